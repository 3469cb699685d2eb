"""Translation rule for MindSpeed-LLM's sparse attention: indexer, loss, and shared selections."""

from __future__ import annotations

from mindspeed_dsa.tools.migrate.job import Given, Job, made

_FLAG, _ABSORB = "--enable-dsa-indexer", "--enable-mla-absorb"
_SIZES = {
    "--index-n-heads": ("--dsa-indexer-n-heads", "64"),
    "--index-head-dim": ("--dsa-indexer-head-dim", "128"),
    "--index-topk": ("--dsa-indexer-topk", "2048"),
    "--indexer-loss-coeff": ("--dsa-indexer-loss-coeff", "1.0"),
}
"""Dict from MindSpeed-LLM's flag of the indexer to Megatron's flag and MindSpeed-LLM's default."""
_FUSED_LOSS = {"--use-fused-lightning-indexer", "--use-fused-lightning-indexer-loss"}
"""Flags that switch on each other in MindSpeed-LLM."""


def select(job: Job) -> None:
    """Translate the indexer's flags, and add MindSpeed-LLM's defaults that differ from Megatron's."""
    if _FLAG not in job:
        return
    query = "latent query before its norm there"
    if _ABSORB in job:
        query = "latent query after its norm there, as DeepSeek's does"
    elif not job.before("0.19"):
        why = (
            f"Without {_ABSORB} the indexer reads the {query}, and from Megatron-core 0.19 on "
            f"after it: add {_ABSORB}, which is DeepSeek's way, or take an older release."
        )
        job.is_dropped(_FLAG, why, results=True)
        return
    now = [made("--experimental-attention-variant", "dsa"), made("--dsa-indexer-use-sparse-loss")]
    now += [made(name, value) for old, (name, value) in _SIZES.items() if old not in job]
    # MindSpeed-LLM's key norm is computed in fp32, with this epsilon whatever --norm-epsilon says.
    now += [made("--dsa-indexer-k-norm-epsilon", "1e-6"), made("--dsa-indexer-k-norm-fp32")]
    now += _shared_selections(job)
    if job.before("0.19") and job.number("--context-parallel-size", 1) != 1:
        # Before 0.19 Megatron has no context parallelism for sparse attention; the fused one here has it,
        # in absorbed form.
        now.append(made("--use-fused-dsa"))
        now += [] if _ABSORB in job else [made("--use-dsa-absorb")]
    if job.before("0.19"):  # later releases always use DeepSeek's layout and norm, and refuse these flags
        now.append(made("--dsa-indexer-rope-first"))
        if _ABSORB in job:
            now.append(made("--dsa-indexer-normalised-query"))
    why = (
        "The rotated dimensions come first there; which of them form pairs is another order of weights. "
        f"The indexer reads the {query}."
    )
    if _ABSORB in job and "--use-sparse-flash-attn" in job and not _FUSED_LOSS & set(job.given):
        why += (
            " Without the fused loss MindSpeed-LLM's target weighs heads by a softmax over all keys, future "
            "ones too; here heads count alike, as in DeepSeek's: the indexer loss has other values."
        )
    job.becomes(_FLAG, now, why)


def _shared_selections(job: Job) -> list[Given]:
    """Return the flag for MindSpeed-LLM's default offset 2 (Megatron's is 0), unless there is a pattern."""
    frequency, offset = "--index-topk-freq", "--index-skip-topk-offset"
    if "--index-topk-pattern" in job:
        for flag in (frequency, offset):
            if flag in job:
                job.is_dropped(flag, "--index-topk-pattern overrules it there.")
        return []
    if frequency in job and offset not in job:
        return [made("--dsa-indexer-skip-topk-offset", "2")]
    if offset in job and frequency not in job:
        job.is_dropped(offset, f"Only {frequency} reads it.")
    return []
