"""``weights``: convert a Hugging Face model's files to a Megatron checkpoint, and back."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

from mindspeed_dsa.patches import versions
from mindspeed_dsa.patches.errors import SettingsError
from mindspeed_dsa.runs.files import amount
from mindspeed_dsa.settings import did_you_mean

_WHO = "mindspeed_dsa weights"
_DESCRIPTION = """\
Reads and writes the weights of DeepSeek-V3, DeepSeek-V3.2, GLM-5.x, Kimi-K2, Qwen2, Qwen3, Llama and
Mixtral, a tensor at a time.

  python -m mindspeed_dsa weights import HF_DIR CHECKPOINTS -- FLAGS      files to a checkpoint for --load
  python -m mindspeed_dsa weights export CHECKPOINT HF_DIR --like HF_DIR  a checkpoint to files
  python -m mindspeed_dsa weights flags HF_DIR                            the flags of a model
  python -m mindspeed_dsa weights check HF_DIR                            whether files are whole and finite

Under torchrun several processes share the work. FLAGS are those of the job; what they say of the model is
compared.

Exit status: 0 done; 1 check has found problems; 2 refused."""
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9}
_DTYPES = ("bfloat16", "float16", "float32")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise SettingsError(f"{_WHO}: {message}")


def run(argv: Sequence[str]) -> int:
    """Run ``weights import``, ``export``, ``flags`` or ``check``, and return the exit status."""
    own_words, flags = list(argv), []
    if "--" in own_words:
        cut = own_words.index("--")
        own_words, flags = own_words[:cut], own_words[cut + 1 :]
    options, unknown = _parser().parse_known_args(own_words)
    option_names = [f"--{name.replace('_', '-')}" for name in vars(options)]
    for name in unknown:
        raise SettingsError(f"{_WHO} {options.command}: it takes no {name}{did_you_mean(name, option_names)}")
    if flags and options.command != "import":
        raise SettingsError(f"{_WHO} {options.command}: it takes no flags of a job")
    commands: dict[str, Callable[[Any, Sequence[str]], int | None]] = {
        "import": _import,
        "export": _export,
        "flags": _flags,
        "check": _check,
    }
    # `flags` only reads config.json, so it works without the packages for weights.
    lacking = [name for name in ("safetensors", "tqdm") if find_spec(name) is None]
    if lacking and options.command != "flags":
        raise SettingsError(f"{_WHO}: it needs {' and '.join(lacking)}: pip install 'mindspeed_dsa[weights]'")
    return commands[options.command](options, flags) or 0


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m mindspeed_dsa weights",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(dest="command", required=True, parser_class=_Parser)
    add = commands.add_parser("import", help="files to a checkpoint", allow_abbrev=False)
    add.add_argument("source", type=Path, metavar="HF_DIR")
    add.add_argument("target", type=Path, metavar="CHECKPOINTS")
    add.add_argument(
        "--dtype", choices=_DTYPES, help="of the weights; default: as the job's flags say, else bfloat16"
    )
    add = commands.add_parser("export", help="a checkpoint to files", allow_abbrev=False)
    add.add_argument("checkpoint", type=Path, metavar="CHECKPOINT")
    add.add_argument("target", type=Path, metavar="HF_DIR")
    add.add_argument(
        "--like", type=Path, metavar="HF_DIR", help="model whose config.json, tokenizer and types it gets"
    )
    add.add_argument(
        "--dtype",
        choices=_DTYPES,
        help="of the weights but routers' biases; default: those of --like, else bfloat16",
    )
    add.add_argument(
        "--shard-size", type=_size, default=5 * 10**9, metavar="5GB", help="largest file; default: 5GB"
    )
    add.add_argument(
        "--dsa-indexer-topk-pattern",
        metavar="CSSC...",
        help="leave out the indexers of layers with S, which attend to the keys of a layer below",
    )
    add.add_argument(
        "--fp8-blocks", action="store_true", help="linear weights in FP8, a factor for 128 x 128"
    )
    add = commands.add_parser("flags", help="the flags of a model", allow_abbrev=False)
    add.add_argument("source", type=Path, metavar="HF_DIR")
    default = "of Megatron-core; default: the installed one"
    add.add_argument("--megatron", type=versions.release, metavar="RELEASE", help=default)
    wish = add.add_mutually_exclusive_group()
    wish.add_argument(
        "--train", action="store_true", help="train indexers by a loss of 0.01 on the selected keys; default"
    )
    wish.add_argument("--frozen", action="store_true", help="keep indexers as they are")
    add = commands.add_parser("check", help="whether files are whole and finite", allow_abbrev=False)
    add.add_argument("source", type=Path, metavar="HF_DIR")
    return parser


def _size(text: str) -> int:
    """Parse a size such as ``5GB``, ``500M`` or a number, and return bytes."""
    matched = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]?)B?", text.strip(), re.IGNORECASE)
    if matched is None or not float(matched[1]):
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write 5GB or 500M")
    return int(float(matched[1]) * _UNITS[matched[2].upper()])


def _import(options: argparse.Namespace, flags: Sequence[str]) -> None:
    from mindspeed_dsa.features.checkpoints.agreement import together
    from mindspeed_dsa.tools.weights import importing, job

    with job.processes():
        wanted = together(lambda: job.import_of(options.source, options.target, flags, options.dtype), _WHO)
        importing.run(wanted, _bar("import"))
    if _first():
        for remark in job.remarks(wanted, flags):
            print(f"note: {remark}")
        dtype = str(wanted.dtype).removeprefix("torch.")
        print(f"{wanted.final}: weights in {dtype}; train with --load {options.target}")


def _export(options: argparse.Namespace, flags: Sequence[str]) -> None:
    from mindspeed_dsa.tools.weights import job

    with job.processes():
        plan = job.export(options, _bar("export"))
    if _first():
        for note in plan.notes:
            print(f"note: {note}")
        print(f"{options.target}: {amount(plan.bytes)} in {len(plan.shards)} files")


def _flags(options: argparse.Namespace, flags: Sequence[str]) -> None:
    from mindspeed_dsa.features.checkpoints.hugging_face import config
    from mindspeed_dsa.features.checkpoints.hugging_face.flags import flags_of, flags_of_training
    from mindspeed_dsa.tools.weights.model import release_here

    described, lacking = config.read_model(options.source, _WHO)
    if lacking:  # first: in a shell's array the bracket that ends it would be part of a last line
        print(
            f"# {config.FILE} speaks of {lacking} more layers of multi-token prediction, which the files lack"
        )
    where = f"{_WHO}: {options.source}"
    lines = flags_of(described, options.megatron or release_here(), where)
    print("\n".join([*lines, *flags_of_training(described, options.frozen, where)]))


def _check(options: argparse.Namespace, flags: Sequence[str]) -> int:
    from tqdm import tqdm  # type: ignore[import-untyped]

    from mindspeed_dsa.tools.weights.checking import Check

    check, count = Check(options.source, _bar("check")), 0
    for problem in check.problems():
        count += 1
        tqdm.write(f"- {problem}")  # above the bar
    for note in check.notes:
        print(f"note: {note}")
    print(f"{options.source}: {check.read + ', ' if check.read else ''}{count or 'no'} problems")
    return 1 if count else 0


def _first() -> bool:
    return os.environ.get("RANK", "0") == "0"


def _bar(what: str) -> Callable[[int], Callable[[int], None]]:
    """Return a function that opens a progress bar of N bytes on rank 0 and returns its update function."""

    def begin(total: int) -> Callable[[int], None]:
        if not _first():
            return lambda done: None
        from tqdm import tqdm

        bar = tqdm(total=total, desc=what, unit="B", unit_scale=True, mininterval=1.0)

        def wrote(done: int) -> None:
            bar.update(done)
            if bar.n >= total:
                bar.close()

        return wrote

    return begin
