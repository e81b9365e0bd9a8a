"""YAML documents that nobody vouches for: every fault has a line, and nothing runs without end."""

import random
import time
from pathlib import Path

import pytest

from onnxq.config import list_presets, read_preset
from onnxq.errors import ConfigError, OnnxqError
from tests.config.kit import read, write

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
