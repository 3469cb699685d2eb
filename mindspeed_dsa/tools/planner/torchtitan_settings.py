"""Settings of TorchTitan 0.2's jobs: a TOML file, and words that override it as on the command line.

:data:`DEFAULTS` has the settings that are planned, refused or noted. A plan does not depend on those in
:data:`OTHERS`, and unknown ones are errors.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from mindspeed_dsa.patches.errors import SettingsError
from mindspeed_dsa.settings import did_you_mean

WHO = "mindspeed_dsa plan"
SUFFIX = ".toml"
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "model": {"name": "llama3", "flavor": "debugmodel", "converters": []},
    "training": {
        "local_batch_size": 8,
        "global_batch_size": -1,
        "seq_len": 2048,
        "enable_cpu_offload": False,
        "dtype": "float32",
        "mixed_precision_param": "bfloat16",
    },
    "parallelism": {
        "data_parallel_replicate_degree": 1,
        "data_parallel_shard_degree": -1,
        "fsdp_reshard_after_forward": "default",
        "tensor_parallel_degree": 1,
        "enable_async_tensor_parallel": False,
        "pipeline_parallel_degree": 1,
        "module_fqns_per_model_part": None,
        "pipeline_parallel_first_stage_less_layers": 1,
        "pipeline_parallel_last_stage_less_layers": 1,
        "pipeline_parallel_layers_per_stage": None,
        "pipeline_parallel_schedule": "1F1B",
        "pipeline_parallel_schedule_csv": "",
        "pipeline_parallel_microbatch_size": 1,
        "pipeline_parallel_expert_parallel_overlap": True,
        "context_parallel_degree": 1,
        "context_parallel_rotate_method": "allgather",
        "expert_parallel_degree": 1,
        "expert_tensor_parallel_degree": 1,
        "expert_parallel_comm_backend": "standard",
        "disable_loss_parallel": False,
    },
    "activation_checkpoint": {"mode": "selective", "selective_ac_option": "2"},
    "compile": {"enable": False, "components": ["model", "loss"]},
    "optimizer": {"name": "AdamW", "early_step_in_backward": False, "implementation": "fused"},
    "checkpoint": {"enable": False, "async_mode": "disabled"},
    "validation": {"enable": False},
    "fault_tolerance": {"enable": False},
    "debug": {"moe_force_load_balance": False},
}
"""Settings that are planned, refused or noted, with TorchTitan's defaults."""
OURS: Mapping[str, Mapping[str, Any]] = {
    "optimizer": {
        "npu_swap_optimizer": False,
        "npu_swap_optimizer_times": 16,
        "swap_optimizer": False,
        "swap_optimizer_times": 16,
    },
    "dsa": {"topk": 2048, "index_heads": 64, "index_dim": 128, "loss_coeff": 0.01, "stage": "sparse"},
}
"""Settings that this library or TorchTitan-npu adds."""
OTHERS: Mapping[str, str] = {
    "job": "config_file dump_folder description print_config save_config_file custom_config_module",
    "model": "hf_assets_path tokenizer_path print_after_conversion",
    "training": "dataset dataset_path max_norm steps mixed_precision_reduce gc_freq gc_debug dataloader",
    "parallelism": (
        "context_parallel_load_balancer enable_custom_context_parallel custom_context_parallel_path"
    ),
    "activation_checkpoint": (
        "per_op_sac_force_recompute_mm_shapes_by_fqns early_stop memory_budget preserve_rng_state "
        "visualize_memory_budget_pareto determinism_check debug"
    ),
    "compile": "backend",
    "optimizer": "lr beta1 beta2 eps weight_decay",
    "lr_scheduler": "warmup_steps total_steps decay_ratio decay_type min_lr_factor",
    "checkpoint": (
        "enable_ft_dataloader_checkpoints folder interval initial_load_path initial_load_model_only "
        "initial_load_in_hf initial_load_in_hf_quantized last_save_model_only last_save_in_hf export_dtype "
        "keep_latest_k load_step exclude_from_loading enable_first_step_checkpoint create_seed_checkpoint "
        "load_only"
    ),
    "validation": "dataset dataset_path local_batch_size seq_len freq steps dataloader",
    "fault_tolerance": (
        "process_group process_group_timeout_ms replica_id group_size min_replica_size semi_sync_method"
    ),
    "quantize": "linear grouped_mm",  # for converters that plans refuse
    "memory_estimation": "enable disable_fake_mode",  # for a program that does not train
    "comm": (
        "init_timeout_seconds train_timeout_seconds trace_buf_size save_traces_folder "
        "save_traces_file_prefix mode"
    ),
    "profiling": (
        "enable_profiling save_traces_folder profile_freq profiler_active profiler_warmup "
        "enable_memory_snapshot save_memory_snapshot_folder"
    ),
    "metrics": (
        "log_freq enable_tensorboard disable_color_printing save_tb_folder save_for_all_ranks enable_wandb"
    ),
    "experimental": "custom_import custom_args_module",
    "dsa": "rope_layout backend context_parallel_algo",
    "debug": "seed deterministic deterministic_warn_only",
}
"""Settings that a plan does not depend on; a job's own configuration module can add sections to a file."""


def is_file(words: Sequence[str]) -> bool:
    """Return whether a job's command line begins with a TOML file."""
    return bool(words) and words[0].endswith(SUFFIX)


@dataclass(frozen=True)
class Settings:
    """Settings of a job, with defaults."""

    file: str
    sections: Mapping[str, Mapping[str, Any]]

    def refused(self, key: str, why: str) -> SettingsError:
        """Return the error for a setting: ``[section] key = value``, cause and remedy."""
        section, _, name = key.partition(".")
        value = self.sections[section][name]
        return SettingsError(f"{WHO}: {self.file}: [{section}] {name} = {value!r}: {why}")

    def __getitem__(self, key: str) -> Any:
        section, _, name = key.partition(".")
        return self.sections[section][name]

    def size(self, key: str) -> int:
        """Return a setting that is a number of at least 1."""
        value = self[key]
        if not isinstance(value, int) or value < 1:
            raise self.refused(key, "give 1 or more")
        return value


def read(words: Sequence[str]) -> Settings:
    """Read a job: its TOML file, then words such as ``--training.seq_len 4096``.

    Raises:
        SettingsError: the file cannot be read, or a section has an unknown setting.
    """
    file = words[0]
    try:
        toml = import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    except ModuleNotFoundError as error:
        raise SettingsError(f"{WHO}: {file}: install tomli, or use Python 3.11 or later") from error
    try:
        content = toml.loads(Path(file).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SettingsError(f"{WHO}: {file} cannot be read ({error}); give TorchTitan's TOML file") from error
    for section, in_file in content.items():
        if not isinstance(in_file, dict):
            raise SettingsError(f"{WHO}: {file}: {section} is no section; write [{section}]")
    planned = {
        name: {**DEFAULTS.get(name, {}), **OURS.get(name, {})} for name in dict.fromkeys([*DEFAULTS, *OURS])
    }
    # A module of the job adds sections of its own, and settings.
    extended = bool(content.get("job", {}).get("custom_config_module"))
    sections = planned if extended else {**{name: {} for name in OTHERS}, **planned}
    for section in content:
        if not extended:
            _check_section(file, section, sections)
    for section, keys in sections.items():
        for key, value in content.get(section, {}).items():
            _check_known(file, section, key, keys)
            if key in keys:
                kind = type(keys[key])
                # A float may be written as an integer, and settings without a default may have any type.
                if keys[key] is not None and type(value) is not kind and (type(value), kind) != (int, float):
                    raise SettingsError(f"{WHO}: {file}: [{section}] {key} = {value!r}: give {kind.__name__}")
                keys[key] = value
    for key, values in _overrides(file, words[1:]):
        section, _, name = key.partition(".")
        if section not in sections:
            if section not in content:
                _check_section(file, section, sections)
            continue
        on = not name.startswith(("no-", "no_"))
        name = (name if on else name[3:]).replace("-", "_")
        _check_known(file, section, name.partition(".")[0], sections[section])
        if name in sections[section]:
            sections[section][name] = _value(file, key, values, sections[section][name], on)
    return Settings(file, sections)


def _check_section(file: str, section: str, sections: Mapping[str, Any]) -> None:
    every = {**sections, **OTHERS}
    if section not in every:
        near = difflib.get_close_matches(section, every, n=1)
        hint = f"did you mean {near[0]}?" if near else f"TorchTitan has {', '.join(sorted(every))}"
        raise SettingsError(f"{WHO}: {file}: TorchTitan has no section [{section}]; {hint}")


def _check_known(file: str, section: str, key: str, keys: Mapping[str, Any]) -> None:
    every = [*keys, *OTHERS.get(section, "").split()]
    if key not in every:
        hint = did_you_mean(key, every)
        raise SettingsError(f"{WHO}: {file}: [{section}] has no setting {key!r} that can be planned{hint}")


def _overrides(file: str, words: Sequence[str]) -> list[tuple[str, list[str]]]:
    overrides: list[tuple[str, list[str]]] = []
    for word in words:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            if "." not in name:
                raise SettingsError(
                    f"{WHO}: {word}: settings behind {file} are TorchTitan's, as in --training.seq_len 4096"
                )
            overrides.append((name, [value] if equals else []))
        elif overrides:
            overrides[-1][1].append(word)
        else:
            raise SettingsError(f"{WHO}: {word!r} behind {file} is no setting, as --training.seq_len 4096 is")
    return overrides


def _value(file: str, key: str, words: Sequence[str], before: Any, on: bool) -> Any:
    """Return the value of an override, with the type of the value that it replaces."""
    if isinstance(before, bool) and not words:
        return on
    try:
        (word,) = words
        if isinstance(before, list):
            return [each for each in word.split(",") if each]  # as TorchTitan does
        if isinstance(before, bool):
            return {"true": True, "false": False}[word.lower()]
        return (int if before is None else type(before))(word)
    except (ValueError, KeyError) as error:
        raise SettingsError(f"{WHO}: {file}: --{key} {' '.join(words)} is no value of it") from error
