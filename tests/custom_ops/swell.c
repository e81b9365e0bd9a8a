/* A custom operator for the tests: example.ops:Swell(x) = x * |x|, float32, any shape.

   ONNX Runtime's wheel has no C header, so the few members needed are read from the OrtApi table by their place. Places
   never change: the table is only ever appended to (onnxruntime_c_api.h, struct OrtApi). */
#include <stddef.h>
#include <stdint.h>

typedef void *Status; /* NULL: no error */
typedef struct {
    const void *const *(*GetApi)(uint32_t version);
    const char *(*GetVersionString)(void);
} OrtApiBase;

enum {
    GET_TENSOR_MUTABLE_DATA = 51,
    GET_DIMENSIONS_COUNT = 61,
    GET_DIMENSIONS = 62,
    GET_TENSOR_SHAPE_ELEMENT_COUNT = 64,
    GET_TENSOR_TYPE_AND_SHAPE = 65,
    CREATE_CUSTOM_OP_DOMAIN = 26,
    CUSTOM_OP_DOMAIN_ADD = 27,
    ADD_CUSTOM_OP_DOMAIN = 28,
    KERNEL_CONTEXT_GET_INPUT = 90,
    KERNEL_CONTEXT_GET_OUTPUT = 91,
    RELEASE_TENSOR_TYPE_AND_SHAPE_INFO = 99,
};
enum { API_VERSION = 8, MOST_DIMS = 16, FLOAT32 = 1, REQUIRED = 0 };

static const void *const *api;

typedef struct {
    uint32_t version;
    void *(*CreateKernel)(const void *, const void *, const void *);
    const char *(*GetName)(const void *);
    const char *(*GetExecutionProviderType)(const void *);
    int (*GetInputType)(const void *, size_t);
    size_t (*GetInputTypeCount)(const void *);
    int (*GetOutputType)(const void *, size_t);
    size_t (*GetOutputTypeCount)(const void *);
    void (*KernelCompute)(void *, void *);
    void (*KernelDestroy)(void *);
    int (*GetInputCharacteristic)(const void *, size_t);
    int (*GetOutputCharacteristic)(const void *, size_t);
    /* Later versions have more; with version 8 nothing past here is read. */
} OrtCustomOp;

static void *create(const void *op, const void *table, const void *info) {
    (void)table, (void)info;
    return (void *)op;
}
static const char *name(const void *op) { (void)op; return "Swell"; }
static const char *provider(const void *op) { (void)op; return NULL; }
static int type(const void *op, size_t k) { (void)op, (void)k; return FLOAT32; }
static size_t one(const void *op) { (void)op; return 1; }
static void destroy(void *kernel) { (void)kernel; }
static int required(const void *op, size_t k) { (void)op, (void)k; return REQUIRED; }

static void compute(void *kernel, void *context) {
    (void)kernel;
    const void *x = NULL;
    void *y = NULL, *shape = NULL;
    int64_t dims[MOST_DIMS];
    size_t rank = 0, count = 0;
    const float *from = NULL;
    float *to = NULL;
    ((Status(*)(const void *, size_t, const void **))api[KERNEL_CONTEXT_GET_INPUT])(context, 0, &x);
    ((Status(*)(const void *, void **))api[GET_TENSOR_TYPE_AND_SHAPE])(x, &shape);
    ((Status(*)(const void *, size_t *))api[GET_DIMENSIONS_COUNT])(shape, &rank);
    ((Status(*)(const void *, int64_t *, size_t))api[GET_DIMENSIONS])(shape, dims, rank);
    ((Status(*)(const void *, size_t *))api[GET_TENSOR_SHAPE_ELEMENT_COUNT])(shape, &count);
    ((void (*)(void *))api[RELEASE_TENSOR_TYPE_AND_SHAPE_INFO])(shape);
    ((Status(*)(void *, size_t, const int64_t *, size_t, void **))api[KERNEL_CONTEXT_GET_OUTPUT])(context, 0, dims, rank, &y);
    ((Status(*)(const void *, void **))api[GET_TENSOR_MUTABLE_DATA])(x, (void **)&from);
    ((Status(*)(void *, void **))api[GET_TENSOR_MUTABLE_DATA])(y, (void **)&to);
    for (size_t k = 0; k < count; k++) to[k] = from[k] * (from[k] < 0 ? -from[k] : from[k]);
}

static const OrtCustomOp swell = {API_VERSION, create, name, provider, type, one, type, one,
                                  compute, destroy, required, required};

/* What ONNX Runtime looks up when it loads the library. */
Status RegisterCustomOps(void *options, const OrtApiBase *base) {
    void *domain = NULL;
    api = base->GetApi(API_VERSION);
    Status status = ((Status(*)(const char *, void **))api[CREATE_CUSTOM_OP_DOMAIN])("example.ops", &domain);
    if (!status) status = ((Status(*)(void *, const OrtCustomOp *))api[CUSTOM_OP_DOMAIN_ADD])(domain, &swell);
    if (!status) status = ((Status(*)(void *, void *))api[ADD_CUSTOM_OP_DOMAIN])(options, domain);
    return status;
}
