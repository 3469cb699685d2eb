"""Random jobs of ``examples/pretrain_dsa.py``, and the options that they are drawn from."""

from __future__ import annotations

import random
from dataclasses import dataclass

MODEL = (
    "--num-layers 4 --hidden-size 64 --ffn-hidden-size 128 --seq-length 64 --moe-ffn-hidden-size 64 "
    "--moe-shared-expert-intermediate-size 64 --dsa-indexer-topk 16 --micro-batch-size 1 "
    "--global-batch-size 8 --train-iters 4 --eval-iters 0 --lr-decay-iters 4 --save-interval 2 "
    "--lr 3e-4 --min-lr 3e-4 --no-plot --no-tensorboard --new-run --log-interval 1"
).split()
"""Sizes and steps of every job; its microbatches fill a pipeline of two interleaved ranks."""

_SPREAD = "--sequence-parallel --expert-model-parallel-size 2 --expert-tensor-parallel-size 1"

LAYOUTS: dict[str, tuple[int, str]] = {
    "1": (1, ""),
    "DP2": (2, ""),
    "TP2+SP": (2, "--tensor-model-parallel-size 2 --sequence-parallel"),
    "PP2": (2, "--pipeline-model-parallel-size 2"),
    "PP2 x VPP2": (2, "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2"),
    "EP2": (2, "--expert-model-parallel-size 2"),
    "CP2": (2, "--context-parallel-size 2 --cp-comm-type allgather"),
    "TP2+SP x PP2": (
        4,
        "--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2",
    ),
    "PP2 x EP2": (4, "--pipeline-model-parallel-size 2 --expert-model-parallel-size 2"),
    "TP2+SP x EP2": (
        4,
        f"--tensor-model-parallel-size 2 {_SPREAD}",
    ),
}
"""Name of a layout -> number of ranks, and flags."""

MODELS = (
    "",
    "",
    "--num-experts 0",
    "--mtp-num-layers 1",
    "--experimental-attention-variant none",
    "--calculate-per-token-loss",
    "--dsa-indexer-loss-coeff 0",
    "--no-dsa-indexer-use-sparse-loss",
    "--optimizer sgd",
    "--pack-documents",
    "--dsa-indexer-normalised-query",
    "--dsa-stage warmup",
    "--hidden-dropout 0.1",
    "--seq-length 61",  # which layouts pad
)
"""Flags that change the numbers, and are therefore equal in all jobs of a draw."""

FEATURES: dict[str, str] = {
    "--no-use-fused-dsa": "",
    "--use-dsa-absorb on": "fused",
    "--dsa-fuse-kl-in-backward": "fused",
    "--recompute-activation-function": "",
    "--recompute-norm": "",
    "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1": "",
    "--recompute-granularity full --recompute-method block --recompute-num-layers 1": "",
    "--recompute-granularity selective --recompute-modules core_attn": "",
    "--recompute-granularity selective --recompute-modules layernorm": "",
    "--recompute-granularity selective --recompute-modules mla_up_proj": "",
    "--recompute-granularity selective --recompute-modules moe": "experts",
    "--recompute-granularity selective --recompute-modules mlp": "",
    "--recompute-granularity selective --recompute-modules moe_act --moe-grouped-gemm": "experts",
    "--recompute-in-bubble --recompute-activations": "VPP",
    "--recompute-in-advance --recompute-activations": "PP",
    "--reuse-fp32-param": "bf16",
    "--swap-attention": "",
    "--swap-optimizer": "",
    "--virtual-optimizer all": "",
    "--use-ascend-coc --coc-parallel-num 2": "TP",
    "--moe-alltoall-overlap-comm": "EP",
    "--balanced-moe-experts --no-deterministic-mode": "EP",
    "--moe-batch-overlap --no-deterministic-mode": "EP",
    "--moe-fb-overlap": "EP",
    "--moe-grouped-gemm": "experts",
    "--moe-permute-fusion": "experts",
    "--moe-tp-extend-ep": "TP",
    "--moe-shared-expert-overlap": "EP",
    "--mla-sp-tp-sp": "TP",
    "--fused-operators all": "",
    "--two-streams": "fused",
    "--compile-regions": "",
    "--use-torch-fsdp2": "DP",
    "--use-torch-fsdp2 --fsdp2-prefetch 2": "DP",
    "--use-torch-fsdp2 --fsdp2-shard-experts": "DP",
    "--use-distributed-optimizer": "",
    "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather": "DP",
    "--overlap-grad-reduce": "DP",
    "--cp-keep-gathered": "CP",
    "--cp-block-rows 8": "CP",
}
"""Features that must not change the numbers -> place where each can act: a part of a layout's name, a dtype,
or a kind of model.
"""

MORE_FEATURES: dict[str, str] = {
    "--context-parallel-algo kvallgather_cp_algo": "CP",
    "--cp-shard-vocabulary --fused-linear-cross-entropy": "CP",
    "--fused-linear-cross-entropy": "",
    "--gemm-weight-layout nk --moe-grouped-gemm": "experts",
    "--init-norm-weight-in-fp32": "bf16",
    "--moe-router-load-report FOLDER": "experts",
    "--no-fused-adam": "",
    "--no-gemm-gradient-accumulation-fusion": "",
    "--recompute-verify --recompute-norm": "",
    "--schedules-method dualpipev": "PP",
    "--schedules-method dualpipev --dualpipev-dw-detach": "PP",
    "--split-backward": "PP",
    "--trace-schedule FOLDER/schedule.json": "VPP",
}
"""Features that appear only in pairs: ones that change a part which no other row changes, other pipeline
schedules, and ones that only watch and write to a FOLDER.
"""


@dataclass(frozen=True)
class Draw:
    """One random combination.

    Attributes:
        layout: layout of the first job, a key of :data:`LAYOUTS`.
        resumed: layout of the resumed job.
        dtype: ``fp32`` or ``bf16``.
        model: flags of all three jobs.
        features: flags of the second job, and of the job resumed from it.
    """

    layout: str
    resumed: str
    dtype: str
    model: str
    features: tuple[str, ...]

    @property
    def other_masks(self) -> bool:
        """Whether the resumed job draws other dropout masks than the uninterrupted one."""
        return "dropout" in self.model and self.resumed != self.layout

    def start(self) -> list[str]:
        """Return the flags of the job that writes the first weights; Megatron draws others by layout."""
        return [*MODEL, *self.model.split(), "--train-iters", "0"]

    @property
    def dealt(self) -> tuple[str, ...]:
        """Features that distribute rows, and thus dropout masks, over ranks unlike Megatron.

        Jobs without features get these flags as well. Otherwise, blocks of 8 rows differ from Megatron's rows
        by 0.89 of the tolerance with dropout, and by a thousandth without.
        """
        if "dropout" not in self.model:
            return ()
        return tuple(each for each in self.features if each.startswith("--cp-block-rows"))

    def argv(self, layout: str, features: bool) -> list[str]:
        """Return a job's flags in a layout; a resumed job omits features that do not fit its layout."""
        words = [*MODEL, *LAYOUTS[layout][1].split(), *self.model.split()]
        if self.dtype == "bf16":
            words.append("--bf16")
        for feature in self.features if features else self.dealt:
            if layout == self.layout or fits(feature, layout, self.dtype, self.model):
                words += feature.split()
        return words

    def __str__(self) -> str:
        features = " ".join(self.features)
        return f"{self.layout} -> {self.resumed}, {self.dtype}, {self.model or 'plain'}: {features}"


def fits(feature: str, layout: str, dtype: str, model: str) -> bool:
    """Return whether a feature has something to do in this job."""
    needed = FEATURES[feature]
    dense = "none" in model
    if needed in ("experts", "EP") and "--num-experts 0" in model:
        return False
    if needed in ("", "experts"):
        return True
    if needed == "fused":
        return not dense
    if needed == "DP":
        return layout in ("DP2", "EP2", "PP2 x EP2", "CP2")
    return needed == dtype if needed == "bf16" else needed in layout


def draws(seed: int, count: int) -> list[Draw]:
    """Draw combinations of two to five features, most of which fit the layout; a seed fixes the list."""
    dice = random.Random(seed)
    result: list[Draw] = []
    while len(result) < count:
        layout, resumed = dice.choice(list(LAYOUTS)), dice.choice(list(LAYOUTS))
        dtype, model = dice.choice(("fp32", "bf16")), dice.choice(MODELS)
        fitting = [feature for feature in FEATURES if fits(feature, layout, dtype, model)]
        pool = list(FEATURES) if dice.random() < 0.15 else fitting
        selected = dice.sample(pool, dice.randint(2, 5))
        flags = [word for feature in selected for word in feature.split() if word.startswith("--")]
        if len(set(flags)) == len(flags):  # else one flag has two values
            result.append(Draw(layout, resumed, dtype, model, tuple(selected)))
    return result
