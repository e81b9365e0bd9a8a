// A plugin for TensorRT in the tests: Swell(x) = x * |x| by its name and types; nothing here runs on a GPU.
//
// The wheels have no C++ headers, so the interfaces are declared here by the order of their virtual functions, which is
// that of nvinfer1's version 3 plugins ("V3ONE"): TensorRT asks each for its kind and version before it calls anything.
#include <cstddef>
#include <cstdint>

struct Info {
    const char *kind;
    int32_t major, minor;
};

struct Interface {
    virtual int32_t language() const noexcept { return 0; }
    virtual Info info() const noexcept = 0;
    virtual ~Interface() noexcept = default;
};

struct Shape {
    int32_t rank;
    int64_t sizes[8];
};
struct SymbolicShape {
    int32_t rank;
    const void *sizes[8];
};
struct Tensor {
    Shape shape;
    int32_t type, format;
    float scale;
};
struct DynamicTensor {
    Tensor tensor;
    Shape least, greatest, usual;
};
struct Fields {
    int32_t count;
    const void *first;
};
static const Fields NO_FIELDS{0, nullptr};
enum { LINEAR = 0 };

struct Core : Interface {
    Info info() const noexcept override { return {"PLUGIN_V3ONE_CORE", 1, 0}; }
    virtual const char *name() const noexcept { return "Swell"; }
    virtual const char *version() const noexcept { return "1"; }
    virtual const char *scope() const noexcept { return ""; }
};

struct Build : Interface {
    Info info() const noexcept override { return {"PLUGIN_V3ONE_BUILD", 1, 0}; }
    virtual int32_t configure(const DynamicTensor *, int32_t, const DynamicTensor *, int32_t) noexcept { return 0; }
    virtual int32_t outputTypes(int32_t *out, int32_t, const int32_t *in, int32_t) const noexcept {
        out[0] = in[0];
        return 0;
    }
    virtual int32_t outputShapes(const SymbolicShape *in, int32_t, const SymbolicShape *, int32_t, SymbolicShape *out,
                                 int32_t, void *) noexcept {
        out[0] = in[0];
        return 0;
    }
    virtual bool supports(int32_t at, const DynamicTensor *all, int32_t, int32_t) noexcept {
        return all[at].tensor.type == all[0].tensor.type && all[at].tensor.format == LINEAR;
    }
    virtual int32_t outputs() const noexcept { return 1; }
    virtual size_t workspace(const DynamicTensor *, int32_t, const DynamicTensor *, int32_t) const noexcept { return 0; }
    virtual int32_t tactics(int32_t *, int32_t) noexcept { return 0; }
    virtual int32_t tacticCount() noexcept { return 0; }
    virtual const char *cacheId() noexcept { return nullptr; }
    virtual int32_t formatLimit() noexcept { return 100; }
    virtual const char *metadata() noexcept { return nullptr; }
};

struct Plugin : Interface {
    Info info() const noexcept override { return {"PLUGIN", 1, 0}; }
    virtual Interface *capability(int32_t kind) noexcept = 0;
    virtual Plugin *clone() noexcept = 0;
};

struct Runtime : Interface {
    Info info() const noexcept override { return {"PLUGIN_V3ONE_RUNTIME", 1, 0}; }
    virtual int32_t setTactic(int32_t) noexcept { return 0; }
    virtual int32_t onShapeChange(const Tensor *, int32_t, const Tensor *, int32_t) noexcept { return 0; }
    virtual int32_t enqueue(const Tensor *, const Tensor *, const void *const *, void *const *, void *, void *) noexcept {
        return 1; // it has no kernel
    }
    virtual Plugin *attach(void *) noexcept;
    virtual const Fields *fieldsToSerialize() noexcept { return &NO_FIELDS; }
};

struct Swell final : Plugin {
    Core core;
    Build build;
    Runtime runtime;
    Interface *capability(int32_t kind) noexcept override {
        Interface *const all[] = {&core, &build, &runtime};
        return all[kind];
    }
    Plugin *clone() noexcept override { return new Swell; }
};

Plugin *Runtime::attach(void *) noexcept { return new Swell; }

struct Creator : Interface {
    Info info() const noexcept override { return {"PLUGIN CREATOR_V3ONE", 1, 0}; }
    virtual Plugin *create(const char *, const Fields *, int32_t) noexcept { return new Swell; }
    virtual const Fields *fieldNames() noexcept { return &NO_FIELDS; }
    virtual const char *name() const noexcept { return "Swell"; }
    virtual const char *version() const noexcept { return "1"; }
    virtual const char *scope() const noexcept { return ""; }
};

extern "C" Interface *const *getCreators(int32_t &count) {
    static Creator creator;
    static Interface *all[] = {&creator};
    count = 1;
    return all;
}
extern "C" void setLoggerFinder(void *) {}
