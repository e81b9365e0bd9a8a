"""From calibrated to as good as it gets: ranges, the sweep, attention, promotion; judged on samples kept for that."""

from __future__ import annotations

from dataclasses import dataclass, replace

from onnxq.calibrate import calibrate
from onnxq.config import Config
from onnxq.errors import ConfigError
from onnxq.graph.half import computes_in_half
from onnxq.passes import PassReport
from onnxq.pipeline.attention import settle_attention, without_attention
from onnxq.pipeline.bit_budget import NAME as BITS
from onnxq.pipeline.bit_budget import budgeted
from onnxq.pipeline.budget import Budget
from onnxq.pipeline.inputs import Inputs
from onnxq.pipeline.prepared import PreparedModel, reported
from onnxq.pipeline.promotion import Ground, Outcome, Wish, promoted, whole_bytes
from onnxq.pipeline.ranging import NAME, ranged
from onnxq.pipeline.relief import Relieved, relieved
from onnxq.pipeline.stages import Stages
from onnxq.pipeline.sweeping import NAME as SWEEP
from onnxq.pipeline.sweeping import Trial, swept
from onnxq.plan import Plan
from onnxq.planner import Draft
from onnxq.progress import Progress
from onnxq.report import Promotion
from onnxq.sites import Role

# Shares of the time that is left, where there is a budget.
_RANGES, _RELIEF, _BITS, _SWEEP, _PROMOTION = 0.3, 0.2, 0.4, 0.6, 0.8


@dataclass(frozen=True, eq=False)
class Improving:
    """What the passes after calibration work with."""

    inputs: Inputs
    config: Config
    wish: Wish
    budget: Budget
    stages: Stages
    progress: Progress
    memory_limit: int | None = None


Better = tuple[PreparedModel, Plan]


def improved(
    prepared: PreparedModel, plan: Plan, plain: Plan | None, draft: Draft, scene: Improving
) -> tuple[PreparedModel, Plan, Promotion | None]:
    """The plan after ranges, sweep, attention and promotion, the model with their accounts, and what was promoted.

    plan: calibrated. plain: the same without attention, where that is to be tried.
    """
    prepared, plan = _ranged(prepared, plan, scene)
    if plain is None:
        prepared, plan, draft = _relieved(prepared, plan, draft, scene)
    prepared, plan = _budgeted(prepared, plan, scene)
    before = prepared
    plan = bare = _settled(before, plan, plain, scene)
    prepared, plan = _swept(prepared, plan, scene, "sweep")
    if plan is not bare and plain is not None and plan.quantizes_attention:
        # The sweep makes other errors smaller, and so those of attention larger beside them; never the other way.
        plan = _settled(before, plan, plain, scene)
        if not plan.quantizes_attention:
            bare = replace(
                without_attention(bare, plain),
                refusals=plan.refusals,
                left_float=plan.left_float,
                placement=plan.placement,
                attention=plan.attention,
            )
            prepared, plan = _best(before, (prepared, plan), bare, scene, "sweep without attention")
    outcome = _promoted(prepared, plan, draft, scene)
    if outcome.promotion is not None and outcome.promotion.steps:
        bare = _bare(prepared, outcome.plan, scene)
        prepared, plan = _best(before, (prepared, outcome.plan), bare, scene, "sweep after promotion")
        return prepared, plan, outcome.promotion
    return prepared, outcome.plan, outcome.promotion


def _ranged(prepared: PreparedModel, plan: Plan, scene: Improving) -> Better:
    config, inputs = scene.config, scene.inputs
    if config.effort == "fast":
        return prepared, plan
    if (left_out := _in_half(prepared, NAME, config)) is not None:
        return left_out, plan

    def work(progress: Progress) -> Better:
        return ranged(
            prepared, plan, inputs.calibration, inputs.trial,
            effort=config.effort, skip=config.skip, seed=config.data.seed, outputs=inputs.judges, progress=progress,
        )  # fmt: skip

    with scene.stages.run(NAME):
        return scene.budget.tried(NAME, _RANGES, scene.progress, work, (prepared, plan))


def _relieved(prepared: PreparedModel, plan: Plan, draft: Draft, scene: Improving) -> tuple[PreparedModel, Plan, Draft]:
    config = scene.config
    pairs = any(site.role in (Role.ACTIVATION, Role.OUTPUT) for site in plan.sites) and whole_bytes(plan)
    if config.effort == "fast" or "promote" in config.skip or scene.inputs.synthetic or not pairs:
        return prepared, plan, draft
    if computes_in_half(prepared.proto):
        return prepared, plan, draft
    nothing: Relieved = (plan, draft, ())

    def work(progress: Progress) -> Relieved:
        return relieved(_ground(prepared, plan, draft, scene, progress), plan)

    with scene.stages.run("relieve"):
        plan, draft, lines = scene.budget.tried("promotion", _RELIEF, scene.progress, work, nothing)
    return reported(prepared, PassReport("promote", lines)) if lines else prepared, plan, draft


def _budgeted(prepared: PreparedModel, plan: Plan, scene: Improving) -> Better:
    if scene.config.weight_bits_budget is None:
        return prepared, plan

    def work(progress: Progress) -> Better:
        return budgeted(prepared, plan, scene.inputs.calibration, scene.config, progress=progress)

    with scene.stages.run(BITS):
        return scene.budget.tried(BITS, _BITS, scene.progress, work, (prepared, plan))


def _in_half(prepared: PreparedModel, name: str, config: Config) -> PreparedModel | None:
    """The model with a line that the pass was left out, where it computes in float16; None where it does not.

    The sums these passes live on need more digits than their operators then give.
    """
    if name in config.skip or not computes_in_half(prepared.proto):
        return None
    line = "left out: the network computes in float16; quantize its float32 export for more accuracy"
    return reported(prepared, PassReport(name, (line,)))


def _settled(prepared: PreparedModel, plan: Plan, plain: Plan | None, scene: Improving) -> Plan:
    """The plan with attention quantized or in float, whichever its outputs say."""
    if plain is None:
        return plan
    with scene.stages.run("attention"):
        return settle_attention(prepared, plan, plain, scene.inputs.trial, scene.progress)


def _swept(prepared: PreparedModel, plan: Plan, scene: Improving, name: str) -> Better:
    config, inputs = scene.config, scene.inputs
    if config.effort == "fast":
        return prepared, plan
    if (left_out := _in_half(prepared, SWEEP, config)) is not None:
        return left_out, plan

    def work(progress: Progress) -> Better:
        return swept(
            prepared, plan, inputs.calibration, inputs.trial,
            effort=config.effort, skip=config.skip, seed=config.data.seed, outputs=inputs.judges, progress=progress,
        )  # fmt: skip

    with scene.stages.run(name):
        return scene.budget.tried(name, _SWEEP, scene.progress, work, (prepared, plan))


def _best(before: PreparedModel, held: Better, bare: Plan, scene: Improving, name: str) -> Better:
    """`held`, or `bare` swept anew, whichever answers better. before: the model without accounts of a sweep."""
    again, plan = _swept(before, bare, scene, name)
    if plan is bare:
        return held
    trial = Trial(before, scene.inputs.trial, scene.progress)
    return (again, plan) if trial.score(plan) > trial.score(held[1]) else held


def _bare(prepared: PreparedModel, plan: Plan, scene: Improving) -> Plan:
    """The plan with numbers as calibration gives them: weights rounded to nearest, biases the model's own."""
    sites = tuple(
        replace(site, qparams=None, values=None) if site.role in (Role.WEIGHT, Role.BIAS) else site
        for site in plan.sites
    )
    bare = replace(plan, sites=sites, biases=())
    return calibrate(prepared.proto, bare, scene.inputs.calibration, progress=scene.progress)


def _promoted(prepared: PreparedModel, plan: Plan, draft: Draft, scene: Improving) -> Outcome:
    """The plan with what the wish takes promoted; without a wish only from balanced effort on, and on real samples."""
    config, wish = scene.config, scene.wish
    if not plan.sites or (not wish.asked and (config.effort == "fast" or "promote" in config.skip)):
        return Outcome(plan)
    if scene.inputs.synthetic and not wish.asked:
        return Outcome(plan)
    if computes_in_half(prepared.proto):
        if not wish.asked:
            return Outcome(plan)
        raise ConfigError(
            "min_sqnr, metric", "the network computes in float16, where pairs cannot be switched one by one",
            "quantize its float32 export", code="Q308")  # fmt: skip

    def work(progress: Progress) -> Outcome:
        return promoted(_ground(prepared, plan, draft, scene, progress), plan, wish)

    with scene.stages.run("promote"):
        return scene.budget.tried("promotion", _PROMOTION, scene.progress, work, Outcome(plan))


def _ground(prepared: PreparedModel, plan: Plan, draft: Draft, scene: Improving, progress: Progress) -> Ground:
    config = scene.config
    return Ground(
        prepared=prepared,
        draft=draft,
        calibration=scene.inputs.calibration,
        trial=scene.inputs.trial,
        progress=progress,
        attention=config.attention == "quantized" or plan.quantizes_attention,
        threads=config.verify.threads,
        seed=config.data.seed,
        batch=config.data.batch,
        memory_limit=scene.memory_limit,
        expired=lambda: scene.budget.left() <= 0,
    )
