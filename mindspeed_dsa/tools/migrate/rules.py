"""Translation rules for flags that depend on other flags. The tables of verdicts cover all other flags."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace

from mindspeed_dsa.megatron.low_precision import LowPrecision, low_precision
from mindspeed_dsa.tools.migrate.fine_tuning import tune
from mindspeed_dsa.tools.migrate.job import LATENT, Job, made
from mindspeed_dsa.tools.migrate.layers import arrange
from mindspeed_dsa.tools.migrate.rotary import rotate
from mindspeed_dsa.tools.migrate.sparse_attention import select
from mindspeed_dsa.tools.migrate.weights import convert

_SPECS = [f"mindspeed_llm.tasks.models.spec.{name}_spec" for name in ("deepseek", "qwen3", "bailing")]
"""Layer specs of MindSpeed-LLM that Megatron builds from other flags."""
_BALANCING = "--moe-router-load-balancing-type"
_NORMS = ("--rmsnorm-weight-in-fp32", "--init-norm-weight-in-fp32", "--input-layernorm-in-fp32")


def apply(job: Job) -> None:
    """Apply all translation rules to a job's flags, in their order."""
    for rule in RULES:
        rule(job)


def _shared_experts(job: Job) -> None:
    flag, target = "--n-shared-experts", "--moe-shared-expert-intermediate-size"
    if flag not in job:
        return
    count = job.number(flag)
    # MindSpeed-LLM's name of an expert's width comes second; without either, it is the dense MLP's.
    width = job.number(
        "--moe-ffn-hidden-size", job.number("--moe-intermediate-size", job.number("--ffn-hidden-size"))
    )
    if target in job:
        job.is_dropped(flag, f"{target} is given, which MindSpeed takes instead.")
    elif count == 0:
        job.is_dropped(flag, "No shared expert.")
    elif count is None:
        job.is_dropped(flag, f"The number is not known here; give {target}.", results=True)
    elif width is None:
        job.is_dropped(flag, f"The width of one expert is not known here; give {target}.", results=True)
    else:
        job.becomes(flag, [made(target, str(count * width))], f"{count} of width {width}.")


def _router(job: Job) -> None:
    kind = job.text(_BALANCING, "aux_loss")
    if "--router-gating-in-fp32" in job:
        job.becomes("--router-gating-in-fp32", [made("--moe-router-dtype", "fp32")])
    if "--seq-aux" in job:
        if kind == "none":
            why = (
                "none with --seq-aux means that loss. MindSpeed-LLM counts zeros and ones of its routing map "
                "there, not experts, and adds expert biases to scores: the loss has other values."
            )
            job.overrides("--seq-aux", made(_BALANCING, "seq_aux_loss"), why)
        elif kind in ("aux_loss", "seq_aux_loss"):
            job.is_dropped("--seq-aux", f"MindSpeed-LLM does not read it with {_BALANCING} {kind}.")
        else:
            job.is_dropped("--seq-aux", f"The loss of {_BALANCING} {kind}.", results=True)
    if kind == "softmax_topk":
        why = "It takes the softmax of all experts before the selection, and has no loss."
        job.overrides(_BALANCING, made(_BALANCING, "none"), why)
        if "--norm-topk-prob" not in job:
            job.overrides(_BALANCING, made("--moe-router-pre-softmax"), why)
    elif kind in ("group_limited_greedy", "pai_megatron_aux_loss", "sparsemixer_topk"):
        job.is_dropped(_BALANCING, f"Megatron's router has no {kind}.", results=True)
    softmax = "--topk-softmax-in-fp32"
    in_fp32 = "--router-gating-in-fp32" in job or job.text("--moe-router-dtype") in ("fp32", "fp64")
    low = {"--bf16", "--fp16"} & set(job.given) and not in_fp32
    if softmax in job and "--moe-router-pre-softmax" in job and low:
        why = "Megatron rounds the softmax before experts are selected, unless --moe-router-dtype is fp32."
        job.is_dropped(softmax, why, results=True)
    if "--norm-topk-prob" in job and kind == "aux_loss":
        if "--moe-router-topk-scaling-factor" in job or "--routed-scaling-factor" in job:
            why = (
                "With aux_loss MindSpeed-LLM divides the scaling factor out, and Megatron keeps it; omit one."
            )
            job.is_dropped("--norm-topk-prob", why, results=True)
        elif "--moe-router-pre-softmax" in job:
            job.is_dropped("--norm-topk-prob", "Without --moe-router-pre-softmax Megatron normalises them.")
            job.omits("--moe-router-pre-softmax", "--norm-topk-prob normalises.")
    dispatcher = "--moe-token-dispatcher-type"
    if job.text(dispatcher) == "alltoall_seq":
        job.overrides(dispatcher, made(dispatcher, "alltoall"), "Megatron's own has taken its place.")


def _causal(job: Job) -> None:
    """Translate the mask type ``general``, which leaves packed documents causal in an exchange of heads."""
    causal = "--reset-attention-mask" in job and job.text("--context-parallel-algo") == "ulysses_cp_algo"
    for flag in ("--attention-mask-type", "--cp-attention-mask-type"):
        if causal and job.text(flag) == "general":
            job.is_dropped(flag, "With ulysses_cp_algo it changes nothing: documents are causal.")


def _flash_attention(job: Job) -> None:
    flag, mask = "--use-flash-attn", "--reset-attention-mask"
    if flag in job and mask in job and mask not in job.outcomes:
        why = "Megatron's own attention takes the mask of documents, and PyTorch's operator here does not."
        job.is_dropped(flag, why)
    elif flag in job and job.text("--transformer-impl") != "local":
        job.is_kept(
            flag, "unchanged", "Transformer Engine's attention runs, whose flag is --attention-backend."
        )
    elif flag in job and "--enable-dsa-indexer" in job:
        job.is_kept(flag, "unchanged", "Sparse attention has operators of its own.")
    elif flag in job and LATENT & set(job.given):
        job.is_kept(
            flag, "unchanged", "dense-context-parallel attends so in latent attention, with or without it."
        )
    elif flag in job:
        job.is_kept(flag, "same", "flash-attention serves it.")


def _norms(job: Job) -> None:
    if not {"--bf16", "--fp16"} & set(job.given):
        for flag in _NORMS:
            if flag in job:
                job.is_dropped(flag, "All weights are in fp32.")


def _layers_of_its_own(job: Job) -> None:
    if "--spec" not in job:
        return
    module, *_ = job.given["--spec"].values or ("",)
    if module in _SPECS:
        job.is_dropped("--spec", "Megatron builds these layers from the other flags.")
    elif module.startswith("mindspeed"):
        job.is_dropped(
            "--spec", f"Megatron does not build the layers of {module.rpartition('.')[2]}.", results=True
        )
    else:
        job.is_kept("--spec", "unchanged")


def _documents(job: Job) -> None:
    """Translate ``--reset-attention-mask``: Megatron's local MLA ignores the mask that the flag creates."""
    flag = "--reset-attention-mask"
    latent = LATENT & set(job.given)
    if flag not in job or not latent or job.text("--transformer-impl") != "local":
        return
    predicts = "--mtp-num-layers" in job
    if predicts and job.before("0.16"):
        why = "Multi-token prediction of Megatron-core before 0.16 has no packed documents; omit one of them."
        job.is_dropped(flag, why, results=True)
    elif "--eod-mask-loss" in job:
        why = "Documents attend to themselves; rotary embeddings do not care that positions restart."
        if predicts:
            why += " Multi-token prediction does not look into the next document, as MindSpeed-LLM's does."
        job.becomes(flag, [made("--pack-documents")], why)
    else:
        why = (
            "Megatron's flag makes a mask, which latent attention on its own modules does not read; "
            "--pack-documents masks the loss at ends of documents as well: add --eod-mask-loss, and it takes "
            "the place."
        )
        job.is_dropped(flag, why, results=True)


def _masks(job: Job) -> None:
    mode, before, behind = "--sparse-mode", "--pre-tockens", "--next-tockens"
    if job.text(mode, "0") not in ("0", "2", "3"):
        job.is_dropped(
            mode, f"Attention with mask mode {job.text(mode)} is not causal over all keys.", results=True
        )
    longest = job.number("--seq-length")
    window = job.number(before)
    if before in job and window is None:
        job.is_dropped(before, "A window of a number of keys that is not known here.", results=True)
    elif window is not None and longest is not None and window < longest:
        job.is_dropped(before, f"A window of {window} keys; Megatron's --window-size is one.", results=True)
    if job.text(behind, "0") != "0":
        job.is_dropped(behind, "Keys behind the query are attended to.", results=True)


def _chunks(job: Job) -> None:
    """Drop options of the TP overlap that MindSpeed ignores with TP 1, mode 0 or the fused kernel."""
    if "--use-ascend-coc" in job and job.text("--tensor-model-parallel-size") == "1":
        job.is_dropped("--use-ascend-coc", "--tensor-model-parallel-size is 1.")
        for option in ("--coc-parallel-num", "--coc-fused-kernel"):
            if option in job:
                job.is_dropped(option, "--tensor-model-parallel-size is 1.")
    elif job.text("--coc-mode") == "0" and "--use-ascend-coc" in job:
        job.is_dropped("--use-ascend-coc", "--coc-mode 0 switches it off.")
        for option in ("--coc-parallel-num", "--coc-fused-kernel"):
            if option in job:
                job.is_dropped(option, "--coc-mode 0 switches the overlap off.")
    elif {"--coc-fused-kernel", "--coc-parallel-num"} <= set(job.given):
        job.is_dropped("--coc-parallel-num", "MindSpeed does not read it with --coc-fused-kernel.")


def _pairs(job: Job) -> None:
    """Drop ``--moe-fb-overlap`` for jobs in which this library does not support it; results do not change."""
    flag = "--moe-fb-overlap"
    if flag not in job:
        return
    virtual = {
        "--num-layers-per-virtual-pipeline-stage",
        "--num-virtual-stages-per-pipeline-rank",
        "--pipeline-model-parallel-layout",
    }
    sizes = ("pipeline-model", "tensor-model", "context", "expert-model", "expert-tensor")
    pp, tp, cp, ep, etp = (job.number(f"--{kind}-parallel-size", 1) or 1 for kind in sizes)
    etp = etp if "--expert-tensor-parallel-size" in job else tp
    # The smallest number of data parallel ranks; with more, each has even fewer microbatches.
    replicas = math.lcm(tp * cp, ep * etp) // (tp * cp)
    batch, one = job.number("--global-batch-size"), job.number("--micro-batch-size", 1)
    if pp > 1 and not virtual & set(job.given) and job.text("--schedules-method") != "dualpipev":
        why = "In a pipeline it needs interleaved stages: add --num-layers-per-virtual-pipeline-stage."
        job.is_dropped(flag, why, results=False)
    elif (scales := _precision(job)) and scales.history and job.text("--recompute-granularity") == "full":
        why = (
            "Not together with full recomputation, which is kept, and scales of earlier microbatches "
            f"(--fp8-recipe {scales.recipe})."
        )
        job.is_dropped(flag, why, results=False)
    elif batch and one and batch // (one * replicas) < max(2, pp):
        why = "A step has too few microbatches to pair any: use a larger --global-batch-size to have it."
        job.is_dropped(flag, why, results=False)


def _swapped(job: Job) -> None:
    """Drop swap flags if every layer is fully recomputed, because layer inputs are not swapped here."""
    whole = job.text("--recompute-granularity") == "full" and job.text("--recompute-method") != "block"
    for flag in ("--swap-attention", "--swap-modules"):
        if flag in job and whole and "--swap-attention" in job:
            why = "Nothing is left to swap where --recompute-granularity full recomputes every layer."
            job.is_dropped(flag, why, results=False)


def _recomputed_ahead(job: Job) -> None:
    for flag in ("--recompute-in-advance", "--recompute-in-bubble"):
        if flag in job and "--recompute-granularity" not in job:
            job.is_dropped(flag, "Without --recompute-granularity nothing is recomputed.")


def _precision(job: Job) -> LowPrecision | None:
    """Return what the job's flags say about products in FP8."""
    given = {
        "fp8": {"--fp8-format", "--fp8"} & set(job.given),
        "fp8_recipe": job.text("--fp8-recipe"),
        "fp8_param_gather": "--fp8-param-gather" in job,
    }
    return low_precision(SimpleNamespace(**given))


def _optimizer_in_fp8(job: Job) -> None:
    precision = _precision(job)
    for flag in ("--swap-optimizer", "--swap-optimizer-times"):
        if flag in job and precision is not None and precision.stored:
            why = (
                "It writes weights in parts, and weights stored in fp8 (--fp8-param-gather) need all of them."
            )
            job.is_dropped(flag, why, results=False)


def _gloo(job: Job) -> None:
    flag = "--disable-gloo-group"
    if flag in job and job.text("--ckpt-format") == "torch":
        why = "Megatron needs gloo for --ckpt-format torch; use torch_dist to have both."
        job.is_dropped(flag, why, results=False)


def _ranks_of_context(job: Job) -> None:
    if job.number("--context-parallel-size", 1) == 1:
        for flag in ("--context-parallel-algo", "--ulysses-degree-in-cp"):
            if flag in job:
                job.is_dropped(flag, "--context-parallel-size is 1.")
    elif "--enable-dsa-indexer" in job and job.text("--context-parallel-algo") == "ulysses_cp_algo":
        why = "Sparse attention gathers keys; heads are not exchanged, with the same result."
        job.overrides("--context-parallel-algo", made("--context-parallel-algo", "kvallgather_cp_algo"), why)


def _operators(job: Job) -> None:
    """Drop flags of fused operators, which MindSpeed ignores, if the model does not have the operator."""
    norm, rotary = "--use-fused-rmsnorm", "--use-fused-rotary-pos-emb"
    if norm in job:
        if job.text("--normalization", "LayerNorm") != "RMSNorm":
            job.is_dropped(norm, "The model has no RMSNorm.")
        elif job.text("--transformer-impl", "transformer_engine") == "transformer_engine":
            job.is_dropped(norm, "Transformer Engine's norms are fused already.")
    latent = LATENT & set(job.given)
    rotates = (
        job.text("--position-embedding-type") in ("rope", "mrope")
        or "--use-rotary-position-embeddings" in job
    )
    if rotary in job and not latent and not rotates:
        job.is_dropped(rotary, "The model has no rotary embedding.")


def _vocabulary(job: Job) -> None:
    flag = "--padded-vocab-size"
    if flag in job and job.before("0.14"):
        size, part = job.number("--vocab-size"), job.number("--make-vocab-size-divisible-by", 128) or 1
        # Megatron pads to a multiple of 128 x TP: 129280 = 1010 x 128 needs no padding on TP 1 or 2.
        part *= job.number("--tensor-model-parallel-size", 1) or 1
        if size and str(-(-size // part) * part) == job.text(flag):
            job.is_dropped(flag, "--vocab-size and --make-vocab-size-divisible-by come to it.")


def _muon(job: Job) -> None:
    if "muon" not in job.text("--optimizer"):
        return
    if "--muon-nesterov" in job and job.before("0.17"):
        job.becomes("--muon-nesterov", [made("--muon-use-nesterov")])
    if "--muon-momentum" not in job:
        why = "MindSpeed's momentum of 0.95 is said, because Megatron's default is 0.9."
        job.overrides("--optimizer", made("--optimizer", job.text("--optimizer")), why)
        job.overrides("--optimizer", made("--muon-momentum", "0.95"), why)


# _documents precedes _flash_attention, which reads its outcome for --reset-attention-mask.
RULES: tuple[Callable[[Job], None], ...] = (
    _layers_of_its_own,
    arrange,
    _shared_experts,
    rotate,
    _router,
    select,
    convert,
    tune,
    _norms,
    _documents,
    _causal,
    _flash_attention,
    _masks,
    _chunks,
    _pairs,
    _swapped,
    _recomputed_ahead,
    _optimizer_in_fp8,
    _gloo,
    _ranks_of_context,
    _operators,
    _vocabulary,
    _muon,
)
