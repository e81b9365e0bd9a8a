"""Faults in the words of people: path, cause, the nearest name, a fix; no document runs without end."""

import random
import time
from pathlib import Path

import pytest

from onnxq.backends import load_config
from onnxq.config import Config, list_presets, read_preset
from onnxq.config.document import shorten_value, suggest_key
from onnxq.config.rules import Rule, TensorConfig
from onnxq.errors import ConfigError, OnnxqError
from tests.config.kit import read, write

# (what is wrong, text, what the message must say, line)
FAULTS = [
    ("typo of a value's name", "activations:\n  symetric: true\n", ["activations.symetric", "scheme: symmetric"], 2),
    ("typo of a key", "weigths:\n  bits: 8\n", ["unknown key 'weigths'", "'weights'"], 1),
    ("key of another section", "data:\n  granularity: x\n", ["data.granularity", "known: allow_missing, batch"], 2),
    ("typo inside a rule", "rules:\n  - nod: x\n    set: {bits: 8}\n", ["rules[0].nod", "'node'"], 2),
    ("typo inside set", "rules:\n  - node: x\n    set: {bit: 8}\n", ["rules[0].set.bit", "'bits'"], 3),
    ("typo of a value", "placement: measurd", ["'measurd' is not one of", "'measured'"], 1),
    ("width nobody has", "weights:\n\n  bits: 9", ["weights.bits", "9 is not one of 2, 3"], 3),
    ("number as text", "weights:\n  bits: '8'", ["weights.bits", "without quotes"], 2),
    ("word for a number", "data:\n  samples: many", ["data.samples", "'many'"], 2),
    ("yes is no number", "data:\n  samples: yes", ["data.samples", "True"], 2),
    ("float for a number", "data:\n  seed: 1.5", ["data.seed", "1.5"], 2),
    ("zero samples", "data:\n  samples: 0", ["data.samples", "greater than or equal to 1"], 2),
    ("block without size", "weights:\n  granularity: block", ["weights", "needs a block_size"], 1),
    ("size without block", "weights:\n  block_size: 32", ["block_size is only for granularity 'block'"], 1),
    ("storage too narrow", "weights:\n  storage: int4", ["weights", "cannot hold 8-bit"], 1),
    ("narrow and unsigned", "activations:\n  signed: false\n  narrow_range: true", ["narrow_range", "unsigned"], 1),
    ("role nobody has", "rules:\n  - role: wieght\n    set: {bits: 8}", ["rules[0].role", "'weight'"], 2),
    ("rule without selector", "rules:\n  - set: {bits: 8}", ["rules[0]", "selects nothing"], 2),
    ("rule without set", "rules:\n  - node: x", ["rules[0].set", "missing"], 2),
    ("rule that sets nothing", "rules:\n  - node: x\n    set: {}", ["rules[0].set", "sets nothing"], 3),
    ("float and bits", "rules:\n  - node: x\n    set: {float: true, bits: 8}", ["nothing to quantize", "bits"], 3),
    ("bad regex", "rules:\n  - node: '/(/'\n    set: {bits: 8}", ["rules[0].node", "regular expression"], 2),
    ("empty pattern", "rules:\n  - node: ''\n    set: {bits: 8}", ["rules[0].node", "empty"], 2),
    ("between one thing", "rules:\n  - between: [a]\n    set: {bits: 8}", ["rules[0].between[1]"], 2),
    ("line is not theirs", "rules:\n  - node: x\n    line: 3\n    set: {bits: 8}", ["unknown key 'line'"], 3),
    ("source is not theirs", "source: x", ["unknown key 'source'"], 1),
    ("rules is a list", "rules: 3", ["rules", "must be a list"], 1),
    ("same key twice", "bias: int32\nbias: float", ["bias", "given twice, first in line 1"], 2),
    ("no YAML", "weights: [1", ["not YAML"], 1),
    ("no mapping", "- a\n- b", ["must be a mapping"], 1),
    ("key that is no word", "1: 2", ["a key must be a word"], 1),
    ("date", "bias: 2020-01-01", ["bias", "date is no configuration value"], 1),
    ("alias in itself", "data: &a\n  images: *a", ["contains itself"], 1),
    ("observer without name", "weights:\n  observer: {percentile: 3}", ["weights.observer", "`name`"], 2),
    ("observer option", "weights:\n  observer: {name: mse, k: [1]}", ["'k' must be a number", "list"], 2),
    ("std of zero", "data:\n  images:\n    size: 4\n    std: [0, 1, 1]", ["data.images", "std must be above 0"], 2),
    ("two means", "data:\n  images: {size: 4, mean: [1, 2]}", ["mean has 2 values; RGB has 3"], 2),
    ("three greys", "data:\n  images: {size: 4, color: GRAY, mean: [1, 2, 3]}", ["GRAY has 1 channel"], 2),
    ("falling range", "data:\n  images: {size: 4, range: [1, 0]}", ["range must rise"], 2),
    ("extends no preset", "extends: ort-int9", ["extends", "no preset", "'ort-int8'"], 1),
    ("extends a list", "extends: [a]", ["extends", "name of a preset"], 1),
    ("a short list", "weight_bits_budget: 1", ["weight_bits_budget: must be greater than or equal to 2, not 1"], 1),
    ("a word for a list", "skip: 1.5", ["skip: must be a list, not 1.5"], 1),
    ("nothing for a switch", "verify: {latency: null}", ["verify.latency: must be a valid boolean, not None"], 1),
    ("a number for a switch", "verify: {latency: 1}", ["verify.latency", "must be a valid boolean, not 1"], 1),
    ("no end of bits", "weight_bits_budget: .inf", ["must be a finite number, not inf"], 1),
    ("one of many", "weight_bits: [4, 9]", ["9 is not one of 2, 3, 4, 5, 6, 7, 8, 16"], 1),
    ("a long value", f"data: {{samples: {'x' * 99}}}", ["must be a valid integer, not '" + "x" * 56 + "..."], 1),
    ("a long key", f"? {'x' * 99}\n: 1", ["unknown key '" + "x" * 56 + "..."], 1),
    ("a key of two sections", "observer: 1", ["[Q303]", "fix: write it under `activations`"], 1),
    ("a key of a section", "samples: 1", ["fix: write it under `"], 1),
    ("letters in another order", "weight_onyl: 1", ["did you mean 'weights' or 'weight_bits'"], 1),
    ("a stranger", "zzz: 1", ["known: accuracy, accuracy_level, activation_bits, activations"], 1),
    ("a key of accuracy", "min_sqnr: 30", ["min_sqnr", "write it under `accuracy`"], 1),
    ("a target that is no name", "target: 3", ["target: must be a valid string, not 3"], 1),
    # Sections that serve one command.
    ("typo in diff", "diff:\n  enginse: ort", ["diff.enginse", "'engines'"], 2),
    (
        "engine nobody has",
        "diff:\n  engines: tensorrt",
        ["diff.engines[0]", "'tensorrt' is not one of openvino, ort, qnn, trt"],
        2,
    ),
    ("engine by its target", "prove:\n  engine: trt", ["prove.engine", "tensorrt"], 2),
    ("no time at all", "prove: {timeout: 0}", ["prove.timeout", "greater than 0"], 1),
    ("metric that is none", "accuracy:\n  metric: 3", ["accuracy.metric", "file.py:function"], 2),
    ("budget that is no time", "budget: soon", ["budget", "no time"], 1),
    ("no memory", "data: {memory_limit: 0}", ["data.memory_limit", "greater than or equal to 1"], 1),
    ("lots of memory", "data: {memory_limit: lots}", ["data.memory_limit", "write it as 512MB"], 1),
    ("list for a section", "diff: [layers]", ["diff", "must be a mapping of keys to values"], 1),
    ("seed below 0", "data: {seed: -1}", ["data.seed", "greater than or equal to 0"], 1),
    ("empty batch", "data: {batch: 0}", ["data.batch", "greater than or equal to 1"], 1),
    ("many threads", "verify: {threads: 5000}", ["verify.threads", "less than or equal to 4096"], 1),
    ("fewer than none", "verify: {holdout: -1}", ["verify.holdout", "greater than or equal to 0"], 1),
    ("library that is no path", "runtime: {libraries: [3]}", ["runtime.libraries[0]", "must be a path, not 3"], 1),
    ("nothing for a library", "runtime: {libraries: [null]}", ["must be a path, not None"], 1),
    ("plan that is no path", "output: {plan: 3}", ["output.plan", "must be a path, not 3"], 1),
    # Images.
    ("empty image", "data: {images: {size: 0}}", ["data.images.size[0]", "greater than or equal to 1"], 1),
    ("large image", "data: {images: {size: [4, 70000]}}", ["data.images.size[1]", "less than or equal to 65536"], 1),
    ("three sizes", "data: {images: {size: [4, 4, 4]}}", ["data.images.size", "at most 2 items"], 1),
    ("yes is no size", "data: {images: {size: yes}}", ["data.images.size", "must be a list"], 1),
    ("size as text", "data: {images: {size: '4'}}", ["data.images.size", "must be a list, not '4'"], 1),
    ("brighter than white", "data: {images: {size: 4, fill: 256}}", ["fill: must be less than or equal to 255"], 1),
    ("small letters", "data: {images: {size: 4, color: rgb}}", ["data.images.color", "did you mean 'RGB'"], 1),
    ("colour", "data: {images: {size: 4, colour: RGB}}", ["data.images.colour", "did you mean 'color'"], 1),
    ("level range", "data: {images: {size: 4, range: [1, 1]}}", ["data.images", "range must rise"], 1),
    # Specs and rules.
    ("tiny block", "weights: {granularity: block, block_size: 1}", ["greater than or equal to 2"], 1),
    ("storage of the other sign", "weights: {signed: false, storage: int8}", ["weights", "int8"], 1),
    ("typo of a scheme", "weights: {scheme: asymetric}", ["did you mean 'asymmetric'"], 1),
    ("typo of a granularity", "weights: {granularity: chanel}", ["did you mean 'channel'"], 1),
    ("not float sets nothing", "rules: [{op: '*', set: {float: false}}]", ["rules[0].set", "sets nothing"], 1),
    ("float and forced", "rules: [{op: '*', set: {float: true, quantize: true}}]", ["so quantize cannot be set"], 1),
    ("float and trained", "rules: [{op: '*', set: {float: true, quantizer: lsq}}]", ["so quantizer cannot be set"], 1),
    ("number for an operator", "rules: [{op: 3, set: {bits: 4}}]", ["must be a valid string, not 3"], 1),
    ("one empty pattern of two", "rules: [{op: [a, ''], set: {bits: 4}}]", ["a pattern must not be empty"], 1),
    ("between three", "rules: [{between: [a, b, c], set: {bits: 4}}]", ["at most 2 items"], 1),
    ("tiny block of a rule", "rules: [{op: '*', set: {block_size: 1}}]", ["greater than or equal to 2"], 1),
    # The front end for torch.
    ("typo in torch", "torch:\n  weigths: {}", ["torch.weigths", "weights"], 2),
    ("quantizer with an s", "torch:\n  weights: {quantiser: lsq}", ["torch.weights.quantiser", "quantizer"], 2),
    ("quantizer without a name", "torch: {weights: {quantizer: {alpha: 2}}}", ["torch.weights.quantizer", "`name`"], 1),
    ("list for an option", "torch: {weights: {quantizer: {name: lsq, levels: [1]}}}", ["'levels'"], 1),
    ("typo of a policy", "torch:\n  multi_input: {add: insrt}", ["torch.multi_input", "insert, share, none"], 2),
    ("input before the first", "torch:\n  multi_input: {add: {follow: -1}}", ["torch.multi_input", "'add' must be"], 2),
    ("policy of all", "torch:\n  multi_input: share", ["torch.multi_input", "must map operators"], 2),
    ("no module's name", "torch:\n  skip_trace: ['']", ["torch.skip_trace", "must not be empty"], 2),
    ("bad regex of modules", "torch:\n  skip_trace: ['/(/']", ["torch.skip_trace", "regular expression"], 2),
    ("one is no yes", "torch:\n  fuse_bn: 1", ["torch.fuse_bn", "boolean"], 2),
    ("number for a quantizer", "rules:\n  - node: x\n    set: {quantizer: 3}", ["rules[0].set.quantizer", "`name`"], 3),
]


@pytest.mark.parametrize(("text", "said", "line"), [row[1:] for row in FAULTS], ids=[row[0] for row in FAULTS])
def test_a_fault_names_file_line_path_and_fix(tmp_path: Path, text: str, said: list[str], line: int) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert caught.value.subject.startswith(f"{path}:{line}")
    assert (caught.value.file, caught.value.line) == (str(path), line)
    assert caught.value.fix
    assert [part for part in said if part not in str(caught.value)] == []


def test_a_key_is_suggested_where_it_belongs() -> None:
    assert suggest_key(Config, "block_size") == "write it under `activations`"
    assert suggest_key(TensorConfig, "symetric") == "did you mean `scheme: symmetric`?"
    assert suggest_key(None, "anything") == "remove it"
    assert "'source'" not in suggest_key(Config, "sourc", {Config: frozenset({"source"})})
    assert "'node'" in suggest_key(Rule, "nod")


@pytest.mark.parametrize(
    ("value", "text"),
    [("x", "'x'"), (1.5, "1.5"), ("y" * 100, "'" + "y" * 56 + "..."), (10**5000, "a number of thousands of digits")],
    ids=["word", "float", "long", "huge"],
)
def test_values_fit_a_line(value: object, text: str) -> None:
    assert shorten_value(value) == text


LAUGHS = "a: &a [lol,lol,lol,lol,lol,lol,lol,lol,lol]\n" + "".join(
    f"{b}: &{b} [{','.join([f'*{a}'] * 9)}]\n" for a, b in zip("abcdefghi", "bcdefghij", strict=True)
)

LONG = "a: &a " + "x" * 100_000 + "\nb: [" + ",".join(["*a"] * 1000) + "]"

HOSTILE = {
    "laughs": (LAUGHS, ":", "aliases stand for more than"),
    "one long word a thousand times": (LONG, ":", "aliases stand for more than"),
    "deep lists": ("data: " + "[" * 1000, ":1", "nested too deeply"),
    "deep lists, closed": ("data: " + "[" * 60 + "]" * 60, ":1", "nested too deeply"),
    "deep maps": ("data: " + "{a: " * 1000, ":1", "nested too deeply"),
    "NUL": ("target: ort\nbias: \0", ":2", "the character '\\x00'"),
    "digits": ("weights: {bits: " + "9" * 5000 + "}", ":1: weights.bits", "weights.bits"),
    "hexadecimal digits": ("weights: {bits: 0x" + "f" * 5000 + "}", ":1: weights.bits", "too large"),
    "no such date": ("bias: 2020-13-45", ":1: bias", "no value of its kind"),
    "a timestamp that is none": ("bias: !!timestamp x", ":1: bias", "no value of its kind"),
    "a bool that is none": ("bias: !!bool x", ":1: bias", "no value of its kind"),
    "half a character": ('bias: "\\ud800"', ":1: bias", "surrogate"),
    "NUL in a file's name": ('extends: "a\\0b.yaml"', ":1: extends", "null"),
    "a name too long for the system": (f"extends: {'x' * 5000}", ":1: extends", "no preset or file of this name"),
    "a regular expression too large": (
        "rules: [{op: '/a{99999999999}/', set: {bits: 8}}]",
        ":1: rules[0].op",
        "regular",
    ),
    "a regular expression too deep": (
        f"rules: [{{op: '/{'(' * 3000}/', set: {{bits: 8}}}}]",
        ":1: rules[0].op",
        "regular",
    ),
    "no number": ("data: {images: {size: 4, std: [.nan, 1, 1]}}", ":1: data.images.std[0]", "finite"),
    "infinite": ("data: {images: {size: 4, range: [0, .inf]}}", ":1: data.images.range[1]", "finite"),
    "an observer's option": ("weights: {observer: {name: mse, x: .inf}}", ":1: weights.observer", "not finite"),
    "a key of `set`": ('rules: [{op: "*", quantize: true}]', ":1: rules[0].set", "write it under `set`"),
    "Sparsebit's alpha": ("W: {OBSERVER: {PERCENTILE: {ALPHA: abc}}}", ":1: W.OBSERVER.PERCENTILE.ALPHA", "no number"),
    "Sparsebit's modules": ("SKIP_TRACE_MODULES: 3", ":1: SKIP_TRACE_MODULES", "list"),
}


@pytest.mark.parametrize(("text", "place", "cause"), HOSTILE.values(), ids=HOSTILE)
def test_hostile_files_end_in_words(tmp_path: Path, text: str, place: str, cause: str) -> None:
    begun = time.process_time()
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, text)
    assert time.process_time() - begun < 5
    assert caught.value.subject.startswith(f"{tmp_path / 'c.yaml'}{place}")
    assert cause in str(caught.value)
    assert caught.value.fix


@pytest.mark.parametrize("other", ["b.yaml", "./d/../b.yaml"])
def test_a_circle_of_files_is_seen_also_under_other_names(tmp_path: Path, other: str) -> None:
    (tmp_path / "d").mkdir()
    write(tmp_path, "extends: a.yaml", "b.yaml")
    with pytest.raises(ConfigError, match="extends itself"):
        read(tmp_path, f"extends: {other}", "a.yaml")


RULES = """rules:
  - node: [a, '/b/']
    role: weight
    set: {bits: 4, observer: {name: mse}}
data: {images: {size: 4}}
"""

SPARSEBIT = """BACKEND: tensorrt
W: {QSCHEME: per-channel-symmetric, QUANTIZER: {TYPE: lsq, BIT: 4}, OBSERVER: {TYPE: MSE},
  SPECIFIC: [{'conv*': ['QUANTIZER.BIT', 8]}]}
A: {QSCHEME: per-tensor-affine, QADD: {ENABLE_QUANT: true}}
"""

SEEDS = [*(read_preset(name) for name in list_presets()), RULES, SPARSEBIT]

PIECES = [
    "null", "[]", "{}", "[[1]]", "{a: 1}", "-1", "1e308", ".nan", ".inf", "9" * 4400, "0x" + "f" * 4400, "''", "'*'",
    "yes", "2020-13-45", "!!int x", "!!python/object:os.system x", "!!binary x", "&a [*a]", "*b", "? x", "<<: {a: 1}",
    "\0", "\x07", "\ud7ff", "- ", ": ", "\t", "{", "]", "|\n", "---\n", "%YAML 9.9\n", "[" * 300, "rules: ",
]  # fmt: skip


def test_no_mutation_of_a_configuration_is_a_defect(tmp_path: Path) -> None:
    rng, outcomes = random.Random(7), set()
    end = time.process_time() + 1
    for _ in range(1500):
        lines = rng.choice(SEEDS).splitlines(keepends=True)
        for _ in range(rng.randint(1, 3)):
            k = rng.randrange(len(lines))
            head, colon, rest = lines[k].partition(":")
            piece = rng.choice(PIECES)
            lines[k] = rng.choice(
                [f"{head}{colon} {piece}\n", f"{piece}{colon}{rest}", f"{lines[k]}{piece}\n", "", "x\n"]
            )
        try:
            read(tmp_path, "".join(lines))
            outcomes.add("read")
        except OnnxqError:
            outcomes.add("told")
        if time.process_time() > end:
            break
    assert outcomes == {"read", "told"}
