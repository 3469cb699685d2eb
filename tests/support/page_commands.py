"""Commands on the pages for tests: lines of shell blocks, and training flags among them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "examples").rglob("*.md")),
]
BLOCK = re.compile(r"^( *)```(\w*)\n(.*?)^\1```", re.M | re.S)
ARRAY = re.compile(r"^\w+=\(.*?\)$", re.M | re.S)
ASSIGNED = re.compile(r"^(\w+)=(?:\((.*)\)|\"(.*)\")$")
JOB = shlex.split(
    "--num-layers 8 --hidden-size 1024 --ffn-hidden-size 4096 --num-attention-heads 16 --seq-length 4096 "
    "--max-position-embeddings 65536 --micro-batch-size 1 --global-batch-size 64 --swiglu "
    "--disable-bias-linear --position-embedding-type rope --normalization RMSNorm "
    "--untie-embeddings-and-output-weights --num-experts 64 --moe-token-dispatcher-type alltoall "
    "--transformer-impl local --attention-dropout 0 --hidden-dropout 0 --train-iters 10 "
    "--save-interval 10 --lr 1e-4"
)
DSA = shlex.split(
    "--multi-latent-attention --experimental-attention-variant dsa --dsa-indexer-n-heads 64 "
    "--dsa-indexer-head-dim 128 --dsa-indexer-topk 2048"
)
PLUGIN = {"--log-router-load": 0, "--router-load-interval": 1}
"""Flags of the example plug-in, which its page installs first, to their number of values."""
UNKNOWN = "(?:unrecognized arguments:.*|^)"
"""Pattern before a flag that Megatron lacks, in argparse's and in ``doctor``'s words."""
NO_TRAINING = "megatron.training"
"""Text in messages about features that need Megatron-LM, if only its core is installed."""
REFUSED = (
    # flags, releases, an expression for the reason
    ("--context-parallel-algo whole_sequences", "", "is unknown"),  # the page registers it first
    ("--load-hf HF_DIR", "", "HF_DIR cannot be read"),
    ("--dsa-replay-selections", "", "holds no recorded selections"),
    ("--moe-expert-placement placement.json", "", "there is no file placement.json"),
    ("--step-metrics-file", "", NO_TRAINING),
    ("--seq-length 125", "<0.16", "is not divisible|should be a multiple of"),
    ("--yarn-original-max-position-embeddings", "<0.14", "say it there"),
    ("--override-opt-param-scheduler", "<0.15", f"{UNKNOWN}--override-opt-param-scheduler"),
    ("--rope-type", "<0.14", f"{UNKNOWN}--rope-type"),
    ("--rope-type", "<0.14", "shifts the labels of multi-token prediction"),
    ("--schedules-method dualpipev", "<0.14", "needs megatron-core >=0.14"),
    ("--moe-fb-overlap", "<0.14", "needs megatron-core >=0.14"),
    ("--moe-expert-placement", "<0.13", "needs megatron-core >=0.13"),
    ("--use-torch-fsdp2", "<0.16", "needs megatron-core >=0.16"),
    ("--sft-mask-prompts", "<0.17", "needs megatron-core >=0.17"),
)
"""Flags on pages that are refused: with files and hosts that are missing here, or in older releases."""


def commands(page: Path) -> Iterator[str]:
    """Yield lines of a page's shell blocks: lines joined, comments removed, variables substituted."""
    variables: dict[str, str] = {}
    for _, language, block in BLOCK.findall(page.read_text(encoding="utf-8")):
        if language not in ("", "bash"):
            continue
        block = ARRAY.sub(lambda found: found[0].replace("\n", " "), block)
        lines = [re.sub(r"(^|\s+)#.*$", "", each).strip() for each in block.replace("\\\n", " ").splitlines()]
        if all(line.startswith("--") for line in lines):  # flags, over several lines
            lines = [" ".join(lines)]
        for line in filter(None, lines):
            assigned = ASSIGNED.match(line)
            for name, value in variables.items():
                line = line.replace(f'"${{{name}[@]}}"', value).replace(f"${name}", value)
            if assigned:
                variables[assigned[1]] = re.sub(r'"\$\{\w+\[@\]\}"', "", assigned[2] or assigned[3])
            else:
                yield re.sub(r'"\$\{\w+\[@\]\}"', "", line)


def words_of(text: str) -> list[str]:
    """Return the words of a command, without dots, brackets of optional parts, and the plug-in's flags."""
    words = [word.strip("[]") for word in shlex.split(text) if word.strip("[]") not in ("...", "")]
    for flag, values in PLUGIN.items():
        if flag in words:
            at = words.index(flag)
            del words[at : at + 1 + values]
    return words


def flags_of_training(line: str) -> list[str] | None:
    """Return the flags of a command that trains with Megatron-LM's parser, or None."""
    if line.startswith("python -m mindspeed_dsa"):
        line = line.partition(" -- ")[2]
    match = re.search(r"(?:^|pretrain_gpt\.py|pretrain_gpt_\w+\.sh|^\.\.\.)\s+(--.*|\.\.\. .*|$)", line)
    if line.startswith("--"):
        return words_of(line)
    return words_of(match[1]) if match and line else None


LINES = {page: list(commands(page)) for page in PAGES}
TRAINING = list(
    dict.fromkeys(
        tuple(flags) for lines in LINES.values() for line in lines if (flags := flags_of_training(line))
    )
)


def beginning(*starts: str) -> list[str]:
    """Return the commands of all pages with these beginnings, each once, without the beginning."""
    found = (line for lines in LINES.values() for line in lines)
    return list(
        dict.fromkeys(
            line.removeprefix(start).strip() for line in found for start in starts if line.startswith(start)
        )
    )


def jobs() -> Iterator[tuple[str, list[str]]]:
    """Yield each block of training flags as one line, and its flags combined with a small job's."""
    for flags in TRAINING:
        if "--accept-mindspeed-flags" not in flags:
            line = " ".join(flags)
            has_dsa = "--use-fused-dsa" in flags or "dsa" in flags or "--dsa-" in line
            yield line, [*JOB, *(DSA if has_dsa else ()), *flags]


def wrong_answers(line: str, release: str, found: list[str], core_only: bool = True) -> list[str]:
    """Return the differences between a release's answer to a block and the page.

    Args:
        line: flags of the block.
        release: version of the Megatron-LM that answered.
        found: reasons for which it refuses the flags.
        core_only: whether only Megatron's core is installed.
    """
    wanted = [said for given, on, said in REFUSED if given in line and SpecifierSet(on).contains(release)]
    wanted = [said for said in wanted if core_only or said != NO_TRAINING]
    wrong = [f"{line}: {each}" for each in found if not any(re.search(said, each) for said in wanted)]
    if wanted and not found:
        wrong.append(f"{line}: is taken by {release}, and the page says that it is not: {wanted}")
    return wrong
