"""Refused settings by name, and MindSpeed's config file for FSDP2."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from mindspeed_dsa.features.data_parallel.fsdp2.feature import FEATURE, Options
from mindspeed_dsa.patches.errors import SettingsError
from tests.support import contexts


def problems(**arguments):
    return list(FEATURE.problems(SimpleNamespace(**{"use_torch_fsdp2": True, **arguments})))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"use_distributed_optimizer": True}, "omit --use-distributed-optimizer"),
        ({"gradient_accumulation_fusion": True}, "add --no-gradient-accumulation-fusion"),
        ({"fp16": True}, "use --bf16"),
        ({"fp8": "e4m3", "fp8_param_gather": True}, "omit --fp8-param-gather"),
        ({"untie_embeddings_and_output_weights": False}, "add --untie-embeddings-and-output-weights"),
        ({"ckpt_format": "torch"}, "it does not save shards; use torch_dist"),
        ({"ckpt_format": "torch_dcp"}, "no job could load its checkpoints; use torch_dist"),
        ({"data_parallel_random_init": True}, "omit --data-parallel-random-init"),
        ({"mtp_detach_heads": True}, "reads the output layer's weight outside of the layer"),
        ({"delay_wgrad_compute": True}, "omit --delay-wgrad-compute: --moe-fb-overlap delays"),
        ({"hybrid_override_pattern": "M*M*"}, "--hybrid-override-pattern: checkpoints of Mamba layers"),
        ({"optimizer": "muon"}, "use adam or sgd"),
        ({"optimizer": "lion"}, "use adam or sgd"),
        ({"cuda_graph_impl": "local"}, "graphs read weights where they lay"),
        ({"experimental_attention_variant": "gated_delta_net"}, "omit --use-torch-fsdp2"),
        ({"tensor_model_parallel_size": 1, "tensor_parallel_num_weight_shards": 2}, "choose one"),
        ({"fsdp2_prefetch": -1}, "it must be 0 or more"),
        ({"fsdp2_sharding_size": 3, "data_parallel_size": 4}, "divide the 4 ranks"),
        ({"use_torch_fsdp2": False, "fsdp2_prefetch": 0}, "--fsdp2-prefetch has no effect without"),
        (
            {"use_torch_fsdp2": False, "fsdp2_shard_experts": True},
            "--fsdp2-shard-experts has no effect without",
        ),
        (
            {"fsdp2_shard_experts": True, "log_params_norm": True, "expert_model_parallel_size": 2},
            "--log-params-norm would count one rank's shards of experts only",
        ),
        ({"fsdp2_shard_experts": True, "num_experts": None}, "has no experts; drop the flag"),
        (
            {"fsdp2_shard_experts": True, "transformer_impl": "transformer_engine"},
            "use --transformer-impl local",
        ),
        (
            {"fsdp2_shard_experts": True, "tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 1},
            "omit it, or use --moe-tp-extend-ep",
        ),
    ],
)
def test_refused_by_name(arguments, says):
    (problem,) = problems(**arguments)
    assert says in problem


def test_what_it_serves():
    assert not problems(
        pipeline_model_parallel_size=2,
        expert_model_parallel_size=2,
        tensor_model_parallel_size=2,
        context_parallel_size=2,
        data_parallel_size=2,
        fsdp2_sharding_size=2,
        fsdp2_shard_experts=True,
        num_experts=8,
        ckpt_format="torch_dist",
        untie_embeddings_and_output_weights=True,
        experimental_attention_variant="dsa",
        optimizer="adam",
        bf16=True,
    )


def options(path, text, **flags):
    path.write_text(text)
    return Options.of(SimpleNamespace(fsdp2_config_path=str(path), **flags))


def test_mindspeeds_file(tmp_path):
    parsed = options(
        tmp_path / "fsdp2.yaml",
        """
        sharding_size: 4
        sub_modules_to_wrap: [torch.nn.Linear]
        reshard_after_forward: false
        param_dtype: bf16
        reduce_dtype: bf16
        cast_forward_inputs: true
        ignored_modules: [torch.nn.LayerNorm]
        offload_to_cpu: false
        pin_memory: true
        num_to_forward_prefetch: 2
        recompute_modules:
        """,
        fsdp2_prefetch=3,
    )
    assert parsed == Options(
        prefetch=3,
        reduce_dtype="bf16",
        param_dtype="bf16",
        sharding_size=4,
        reshard=False,
        wrapped=("torch.nn.Linear",),
        ignored=("torch.nn.LayerNorm",),
    )


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("sharding: 4", "sharding is not one of its keys"),
        ("reshard_after_forward: 0", "it must be true, false or a number of ranks"),
        ("sharding_size: many", "sharding_size is 'many', it must be a number of ranks"),
        ("offload_to_cpu: true", "offload_to_cpu is not served"),
        ("recompute_modules: [torch.nn.Linear]", "use Megatron's --recompute-granularity"),
        ("cast_forward_inputs: false", "omit cast_forward_inputs"),
        ("- 4", "must hold keys and values"),
        ("a: b: c", "cannot be read"),
    ],
)
def test_what_the_file_cannot_say(tmp_path, text, says):
    with pytest.raises(SettingsError, match=f"--fsdp2-config-path .*{says}"):
        options(tmp_path / "fsdp2.yaml", text)


def test_experts_are_not_kept_on_fewer_ranks(tmp_path):
    path = tmp_path / "fsdp2.yaml"
    path.write_text("reshard_after_forward: 2")
    assert not problems(fsdp2_config_path=str(path))
    (problem,) = problems(fsdp2_config_path=str(path), fsdp2_shard_experts=True)
    assert "reshard_after_forward: 2" in problem
    assert "write true or false" in problem


def test_weights_are_of_the_files_type(tmp_path):
    path = tmp_path / "fsdp2.yaml"
    path.write_text("param_dtype: bf16")
    assert not problems(fsdp2_config_path=str(path), bf16=True)
    (problem,) = problems(fsdp2_config_path=str(path), bf16=False)
    assert "param_dtype is bf16 and the job's weights are fp32" in problem


def test_megatrons_checks_are_not_told_of_it_beside_experts():
    from mindspeed_dsa.features.data_parallel.fsdp2.wrapper import validate_beside_experts_and_pipelines

    def stock(args):
        assert not args.use_torch_fsdp2 or args.expert_model_parallel_size == 1, "not supported"
        return args.use_torch_fsdp2

    validate = validate_beside_experts_and_pipelines(stock, contexts.context("torch-fsdp2"))
    sizes = {"pipeline_model_parallel_size": 1, "expert_model_parallel_size": 2}
    beside = SimpleNamespace(use_torch_fsdp2=True, high_priority_stream_groups=["dp_cp"], **sizes)
    assert validate(beside) is False
    assert beside.use_torch_fsdp2 is True
    assert beside.high_priority_stream_groups == ["dp_cp", "ep_dp"]
    assert (
        validate(SimpleNamespace(use_torch_fsdp2=True, **{**sizes, "expert_model_parallel_size": 1})) is True
    )


def test_a_checkpoint_names_the_format_of_the_distributed_optimizer():
    from mindspeed_dsa.features.data_parallel.fsdp2.checkpoint import say_format

    said = say_format(lambda args: {"singleton_local_shards": False})
    plain, asked = (
        SimpleNamespace(use_torch_fsdp2=True, dist_ckpt_optim_fully_reshardable=asked)
        for asked in (False, True)
    )
    assert said(plain) == {"singleton_local_shards": False}
    assert said(asked) == {
        "singleton_local_shards": False,
        "distrib_optim_sharding_type": "fully_reshardable",
    }
