"""Checkpoints of ``--ckpt-format torch``: a file for each rank of a layout, with its parameters by module.

Only Megatron's own model of a rank tells what that rank holds. It is built without memory, in a process of
its own, where groups of ranks that do not exist stand for those of the job.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mindspeed_dsa.feature import Megatron
from mindspeed_dsa.features.checkpoints.hugging_face.pieces import (
    Files,
    Piece,
    pieces_of,
    read_piece,
    state_of,
)
from mindspeed_dsa.patches.errors import SettingsError
from mindspeed_dsa.runs.files import RunError, written
from mindspeed_dsa.tools.weights.model import chunk, features

_FILE = "model_optim_rng.pt"
_WHO = "mindspeed_dsa weights"


@dataclass(frozen=True)
class Layout:
    """Ranks of a job, as far as they decide which parameters one has; fields are Megatron's arguments.

    Attributes:
        tensor: ranks that share each tensor.
        pipeline: stages.
        expert: ranks that share a layer's experts.
        expert_tensor: ranks that share each expert's tensors.
        virtual: chunks of a stage; None: one, which has no number.
        first, last: layers of the first and the last stage, if they differ.
        unknown: flags of the job that this cannot serve.
    """

    tensor: int = 1
    pipeline: int = 1
    expert: int = 1
    expert_tensor: int = 1
    virtual: int | None = None
    first: int | None = None
    last: int | None = None
    unknown: tuple[str, ...] = ()

    def problems(self, format: str) -> Iterator[str]:
        """Yield why files of such a layout cannot be written."""
        if format != "torch":
            yield "import in torch_dist or torch"
        for flag in self.unknown:
            yield f"{flag} names or divides parameters otherwise; train with --load-hf, or use torch_dist"
        if self.tensor % self.expert_tensor:
            yield (
                f"ranks of --expert-tensor-parallel-size {self.expert_tensor} would share a file with "
                f"--tensor-model-parallel-size {self.tensor}; use torch_dist"
            )

    @property
    def ranks(self) -> int:
        """Ranks of the smallest job of this layout, all of whose files differ."""
        return math.lcm(self.tensor, self.expert_tensor * self.expert) * self.pipeline

    def folder(self, rank: int) -> str:
        """Return the folder of a rank's file, as Megatron names it."""
        stage = rank // (self.ranks // self.pipeline)
        name = f"mp_rank_{rank % self.tensor:02d}"
        name += f"_{stage:03d}" if self.pipeline > 1 else ""
        return name + (f"_{rank // self.expert_tensor % self.expert:03d}" if self.expert > 1 else "")

    @property
    def configuration(self) -> dict[str, Any]:
        """Return the fields of Megatron's configuration."""
        found = {
            "tensor_model_parallel_size": self.tensor,
            "sequence_parallel": self.tensor > 1,
            "pipeline_model_parallel_size": self.pipeline,
            "virtual_pipeline_model_parallel_size": self.virtual,
            "expert_model_parallel_size": self.expert,
            "expert_tensor_parallel_size": self.expert_tensor,
            "num_layers_in_first_pipeline_stage": self.first,
            "num_layers_in_last_pipeline_stage": self.last,
        }
        return {name: value for name, value in found.items() if value is not None}


_SIZES = {
    "tensor": "--tensor-model-parallel-size",
    "pipeline": "--pipeline-model-parallel-size",
    "expert": "--expert-model-parallel-size",
    "expert_tensor": "--expert-tensor-parallel-size",
    "virtual": "--num-virtual-stages-per-pipeline-rank",
    "first": "--decoder-first-pipeline-num-layers",
    "last": "--decoder-last-pipeline-num-layers",
}
_UNKNOWN = (
    "--moe-grouped-gemm",
    "--pipeline-model-parallel-layout",
    "--account-for-embedding-in-pipeline-split",
    "--account-for-loss-in-pipeline-split",
)


def layout_of(flags: Sequence[str], layers: int) -> Layout:
    """Return the layout that a job's flags say.

    Args:
        flags: of the job.
        layers: of the decoder.

    Raises:
        SettingsError: a flag has no number, or stages do not divide the layers.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for name, flag in _SIZES.items():
        parser.add_argument(flag, dest=name, type=int)
    parser.add_argument("--num-layers-per-virtual-pipeline-stage", dest="layers", type=int)
    parser.add_argument("--transformer-impl", dest="implementation", default="transformer_engine")
    try:
        said, rest = parser.parse_known_args(list(flags))
    except argparse.ArgumentError as error:
        raise SettingsError(f"{_WHO} import: {error}") from error
    unknown = [flag for flag in _UNKNOWN if any(word.split("=")[0] == flag for word in rest)]
    if said.implementation != "local":
        unknown.append(f"--transformer-impl {said.implementation}")
    if said.layers and (said.first or said.last):
        unknown.append("--num-layers-per-virtual-pipeline-stage beside stages of other sizes")
    elif said.layers:
        stages = layers // said.layers
        if layers % said.layers or stages % (said.pipeline or 1):
            raise SettingsError(
                f"{_WHO} import: --num-layers-per-virtual-pipeline-stage {said.layers} does not divide "
                f"{layers} layers among {said.pipeline or 1} stages; give a number that does"
            )
        said.virtual = stages // (said.pipeline or 1)
    sizes = {name: getattr(said, name) for name in _SIZES if getattr(said, name) is not None}
    if sizes.get("virtual") == 1:
        del sizes["virtual"]
    sizes.setdefault("expert_tensor", sizes.get("tensor", 1))
    return Layout(**sizes, unknown=tuple(unknown))


@dataclass(frozen=True)
class _Region:
    """Part of a parameter.

    Attributes:
        piece: what is read into it; its own data are none.
        stride, begin: of it within the parameter.
    """

    piece: Piece
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    begin: int


@dataclass(frozen=True)
class _Parameter:
    shape: tuple[int, ...]
    dtype: torch.dtype
    regions: tuple[_Region, ...]


@dataclass(frozen=True)
class RankFile:
    """Content of a rank's file that is not written yet.

    Attributes:
        folder: in the checkpoint's.
        models: by name, ``model`` or ``model0`` and so on: parameters, and other states as they are saved.
    """

    folder: str
    models: Mapping[str, Mapping[str, Any]]

    @property
    def parameters(self) -> list[_Parameter]:
        """All parameters."""
        return [each for model in self.models.values() for each in model.values() if _is(each)]

    @property
    def pieces(self) -> list[Piece]:
        """Everything that is read."""
        return [region.piece for each in self.parameters for region in each.regions]

    @property
    def bytes(self) -> int:
        """Bytes of all parameters."""
        return sum(math.prod(each.shape) * each.dtype.itemsize for each in self.parameters)


def _is(state: Any) -> bool:
    return isinstance(state, _Parameter)


# -- what a rank holds -------------------------------------------------------------------------


def planned(values: Mapping[str, Any], vocabulary: int, dtype: torch.dtype, layout: Layout) -> list[RankFile]:
    """Return what the file of every rank holds; a rank's model is built in another process.

    Args:
        values: Megatron's arguments of the model, by name.
        vocabulary: padded.
        dtype: of its parameters.
        layout: of the job.

    Raises:
        RunError: Megatron cannot build such a model in this layout.
    """
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as other:
        try:
            return other.submit(_planned, dict(values), vocabulary, dtype, layout).result()
        except RunError:
            raise
        except Exception as error:  # whatever Megatron says of a layout that it does not have
            raise RunError(
                f"{_WHO}: Megatron does not build this model as {layout}: {error}; use torch_dist"
            ) from error


def _planned(
    values: Mapping[str, Any], vocabulary: int, dtype: torch.dtype, layout: Layout
) -> list[RankFile]:
    found = []
    with features(values):
        for rank in range(layout.ranks):
            with _standing_for(rank, layout):
                stage = rank // (layout.ranks // layout.pipeline)
                models = {}
                for number in range(layout.virtual or 1):
                    Megatron()("core.parallel_state").set_virtual_pipeline_model_parallel_rank(
                        None if layout.virtual is None else number
                    )
                    model = chunk(
                        values,
                        vocabulary,
                        dtype,
                        layout.configuration,
                        pre_process=stage == number == 0,
                        post_process=(stage, number) == (layout.pipeline - 1, (layout.virtual or 1) - 1),
                        vp_stage=None if layout.virtual is None else number,
                    )
                    models["model" if layout.virtual is None else f"model{number}"] = dict(_states(model))
            found.append(RankFile(layout.folder(rank), models))
    return found


@contextmanager
def _standing_for(rank: int, layout: Layout) -> Iterator[None]:
    """Provide the groups of a rank, in which nothing can be sent."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    megatron = Megatron()
    state = megatron("core.parallel_state")
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=layout.ranks)
    try:
        state.initialize_model_parallel(
            tensor_model_parallel_size=layout.tensor,
            pipeline_model_parallel_size=layout.pipeline,
            virtual_pipeline_model_parallel_size=layout.virtual,
            expert_model_parallel_size=layout.expert,
            expert_tensor_parallel_size=layout.expert_tensor,
            create_gloo_process_groups=False,
        )
        megatron("core.tensor_parallel.random").model_parallel_cuda_manual_seed(0)
        yield
    finally:
        state.destroy_model_parallel()
        dist.destroy_process_group()


def _states(model: Any) -> Iterator[tuple[str, Any]]:
    """Yield what a model saves in this format, by name."""
    regions = {
        name: _parameter(entry.data, pieces)
        for name, state in state_of(model, Megatron()).items()
        for entry, pieces in pieces_of({name: state}, Megatron())
    }
    for name, state in model.state_dict_for_save_checkpoint().items():
        if isinstance(state, Tensor) and state.is_meta and name not in regions:
            raise RunError(f"{_WHO}: Megatron has no key of {name} in other layouts; use torch_dist")
        yield name, regions.get(name, state)


def _parameter(whole: Tensor, pieces: Sequence[Piece]) -> _Parameter:
    regions = [
        _Region(
            replace(piece, data=torch.empty(0)),
            tuple(piece.data.shape),
            tuple(map(int, piece.data.stride())),
            int(piece.data.storage_offset() - whole.storage_offset()),
        )
        for piece in pieces
    ]
    return _Parameter(tuple(whole.shape), whole.dtype, tuple(regions))


# -- writing -----------------------------------------------------------------------------------


def write(planned: RankFile, folder: Path, files: Files, layers: int, arguments: argparse.Namespace) -> None:
    """Write a rank's file, unless it is there; it gets its name when it is whole.

    Args:
        planned: what it holds; all of it is in memory at once.
        folder: of the checkpoint.
        files: of the whole model.
        layers: of its decoder.
        arguments: that the checkpoint remembers.

    Raises:
        RunError: the disk does not take it.
    """
    path = folder / planned.folder / _FILE
    if path.exists():
        return
    path.parent.mkdir(exist_ok=True)
    models = {
        name: {key: _made(state, files, layers) if _is(state) else state for key, state in model.items()}
        for name, model in planned.models.items()
    }
    content = {"args": arguments, "checkpoint_version": 3.0, "iteration": 0, **models}
    with written(path) as file:
        try:
            torch.save(content, file)
        except RuntimeError as error:  # of torch's writer
            raise RunError(
                f"{_WHO}: {path} cannot be written ({error.__context__ or error}); make room, or name a "
                "folder that can be written, and give the command again"
            ) from error


def _made(parameter: _Parameter, files: Files, layers: int) -> Tensor:
    out = torch.empty(parameter.shape, dtype=parameter.dtype)
    for region in parameter.regions:
        read_piece(out.as_strided(region.shape, region.stride, region.begin), region.piece, files, layers)
    return out
