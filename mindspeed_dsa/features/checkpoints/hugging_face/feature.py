"""Declaration of load-hf and save-hf, which read and write weights in Hugging Face files."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindspeed_dsa.feature import Feature, Flag, Requires
from mindspeed_dsa.megatron.configuration import argument, check_weight_shards, hybrid_flag
from mindspeed_dsa.megatron.low_precision import check_stored
from mindspeed_dsa.patches import versions
from mindspeed_dsa.patches.errors import SettingsError
from mindspeed_dsa.patches.spec import Patch

_HERE = "mindspeed_dsa.features.checkpoints.hugging_face"
_SAVE = "mindspeed_dsa save-hf"
_TRAINING = "megatron.training.training"
_RELEASES = ">=0.12.1,<0.21"
_REQUIRES = Requires(
    versions={"megatron-core": _RELEASES},
    packages={"safetensors": "pip install 'mindspeed_dsa[weights]'"},
)
LOAD_HF = Flag(
    "--load-hf",
    "Start from the weights in DIR, a folder of safetensors files and a config.json of DeepSeek-V3, "
    "DeepSeek-V3.2, GLM-5.x, Kimi-K2, Qwen2, Qwen3, Llama or Mixtral; each rank reads what it holds. Where "
    "--load has a checkpoint already, the job goes on from that.",
    kind="value",
    metavar="DIR",
)
SAVE_HF = Flag(
    "--save-hf",
    "Write the weights of the last checkpoint to DIR/iter_... as safetensors files with a config.json, when "
    "training ends.",
    kind="value",
    metavar="DIR",
)
SAVE_HF_INTERVAL = Flag(
    "--save-hf-interval",
    "Write them after every checkpoint at a multiple of N steps as well.",
    kind="value",
    type=int,
    metavar="N",
)
SAVE_HF_FP8 = Flag(
    "--save-hf-fp8-blocks",
    "Write linear weights in FP8 (e4m3) with a factor for each block of 128 x 128, as DeepSeek does.",
)


def _release(settings: Any) -> str:
    return versions.of_job(settings) or ""


@dataclass(frozen=True)
class Load:
    """Options of ``--load-hf``.

    Attributes:
        folder: folder of the model.
        release: release of Megatron-core.
    """

    folder: Path
    release: str

    @classmethod
    def of(cls, settings: Any) -> Load:
        """Build from resolved settings."""
        return cls(Path(settings.load_hf), _release(settings))


@dataclass(frozen=True)
class Save:
    """Options of ``--save-hf``.

    Attributes:
        folder: parent folder of the exported models.
        interval: number of steps between exports; 0 exports the last checkpoint only.
        fp8_blocks: whether to write linear weights in FP8.
        like: folder of the model that the job started from; ``None`` without ``--load-hf``.
        release: release of Megatron-core.
    """

    folder: Path
    interval: int
    fp8_blocks: bool
    like: Path | None
    release: str

    @classmethod
    def of(cls, settings: Any) -> Save:
        """Build from resolved settings."""
        return cls(
            folder=Path(settings.save_hf),
            interval=settings.save_hf_interval or 0,
            fp8_blocks=bool(settings.save_hf_fp8_blocks),
            like=Path(settings.load_hf) if getattr(settings, "load_hf", None) else None,
            release=_release(settings),
        )


def _check_model(args: Any, flag: str) -> Iterator[str]:
    """Yield problems with models whose weights are not in files under these names."""
    if hybrid := hybrid_flag(args):
        yield f"{flag} knows layers of GPT models alone, and {hybrid} makes another; omit one of them"
    if argument(args, "mla_down_proj_fusion"):
        yield f"{flag} knows latent attention's two down-projections, not one; omit --mla-down-proj-fusion"
    yield from check_weight_shards(args, flag, "Megatron saves halves of gated weights in another order then")
    if argument(args, "heterogeneous_layers_config_path"):
        yield (
            f"{flag} knows layers of one size, and --heterogeneous-layers-config-path gives each its own; "
            "omit one of them"
        )


def check_load(args: Any, options: Load) -> Iterator[str]:
    """Yield differences between the model's files and the job's arguments."""
    from mindspeed_dsa.features.checkpoints.hugging_face import mismatch

    flag = f"--load-hf {options.folder}"
    if argument(args, "pretrained_checkpoint"):
        yield f"{flag} and --pretrained-checkpoint both say where weights come from; omit one of them"
    yield from _check_model(args, flag)
    yield from check_stored(args, flag, "their master weights would come from the initialization")
    for name in ("use_custom_fsdp", "use_megatron_fsdp"):
        if argument(args, name):
            yield (
                f"{flag}: --{name.replace('_', '-')} takes its master weights before the files are read; use "
                "--use-distributed-optimizer, or weights import and --load"
            )
    for problem in mismatch.problems(args, options.folder, options.release):
        yield f"{flag}: {problem}"


def check_save(args: Any, options: Save) -> Iterator[str]:
    """Yield problems of a job's arguments that would prevent exports with ``--save-hf``."""
    from mindspeed_dsa.features.checkpoints.hugging_face import companions, config, exporting, written_config

    flag = f"--save-hf {options.folder}"
    yield from _check_model(args, flag)
    if not argument(args, "save"):
        yield f"{flag} writes the weights of a checkpoint, and the job saves none; add --save DIR"
    elif "://" in str(args.save):
        yield f"{flag} reads checkpoints in a folder, and --save {args.save} is none; name a folder"
    elif Path(args.save).resolve() == options.folder.resolve():
        yield f"{flag} has the folders of --save's checkpoints; give it another folder"
    else:
        yield from (
            f"{flag}: {problem}" for problem in exporting.refusals(args, options.folder, options.interval)
        )
    format = argument(args, "ckpt_format")
    if format not in (None, "torch_dist"):
        yield f"{flag} reads checkpoints of --ckpt-format torch_dist, not {format}; use that"
    every = argument(args, "save_interval")
    if options.interval < 0 or (options.interval and every and options.interval % every):
        yield (
            f"--save-hf-interval {options.interval} is no multiple of --save-interval {every}, and models "
            "are written of checkpoints; use a multiple"
        )
    if options.like is not None:
        yield from (f"{flag}: {problem}" for problem in companions.problems(options.like))
    if options.interval and argument(args, "async_save"):
        yield (
            "--save-hf-interval reads each checkpoint when it has been saved, and --async-save goes on "
            "saving; omit one of them"
        )
    # A job that leaves the width to Megatron is complete once Megatron has derived it.
    if argument(args, "num_layers") is None or argument(args, "ffn_hidden_size") is None:
        return
    try:
        like = None if options.like is None else config.read_config(options.like, _SAVE)
        rows = (like or {}).get("vocab_size")
        if not isinstance(rows, int):
            known = argument(args, "vocab_size") or argument(args, "padded_vocab_size")
            # Megatron-LM counts the rows when it builds the tokenizer, after this check.
            rows = None if known else 1
        written_config.config_of(args, options.release, _SAVE, vocabulary=rows, like=like)
    except SettingsError as error:
        yield f"{flag}: {error}"


LOAD = Feature(
    name="load-hf",
    summary="Starts a job from a Hugging Face model's files.",
    flags=(LOAD_HF,),
    requires=_REQUIRES,
    options=Load.of,
    check=check_load,
    in_training_loop=True,
    doc="load-hf.md",
    patches=(
        Patch(
            f"{_TRAINING}:get_model",
            "wrap",
            f"{_HERE}.loading:fill_model",
            "weights have to be read between the construction of the model and that of its optimizer",
            versions=_RELEASES,
            required=False,
        ),
        Patch(
            "megatron.training.models.gpt:GPTModelBuilder.build_distributed_models",
            "wrap",
            f"{_HERE}.loading:fill_model",
            "from 0.19 on pretrain_gpt.py hands the loop a builder, which stands for get_model",
            versions=">=0.19,<0.21",
            required=False,
        ),
        Patch(
            f"{_TRAINING}:setup_model_and_optimizer",
            "wrap",
            f"{_HERE}.loading:require_weights",
            "a model that is built in another way would train from weights that are drawn",
            versions=_RELEASES,
            required=False,
        ),
    ),
)
SAVE = Feature(
    name="save-hf",
    summary="Writes the trained weights as a Hugging Face model's files.",
    flags=(SAVE_HF, SAVE_HF_INTERVAL, SAVE_HF_FP8, LOAD_HF),
    requires=_REQUIRES,
    options=Save.of,
    check=check_save,
    in_training_loop=True,
    doc="load-hf.md",
    patches=(
        Patch(
            f"{_TRAINING}:save_checkpoint_and_time",
            "wrap",
            f"{_HERE}.saving:export_in_between",
            "a model is written of a checkpoint that has just been saved",
            params=("iteration",),
            versions=_RELEASES,
            required=False,
        ),
        Patch(
            f"{_TRAINING}:pretrain",
            "wrap",
            f"{_HERE}.saving:export_at_the_end",
            "the last checkpoint is saved in here, and may be saved asynchronously until it returns",
            versions=_RELEASES,
            required=False,
        ),
    ),
)
