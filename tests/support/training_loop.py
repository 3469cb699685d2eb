"""A fork of Megatron with a training loop: the order of calls of ``megatron.training.training.train``."""

from __future__ import annotations

import textwrap
from pathlib import Path

from tests.support import fork

FILES = {
    "training/global_vars.py": """
        from types import SimpleNamespace

        ARGS = SimpleNamespace(consumed_train_samples=0, seq_length=32)


        def get_args():
            return ARGS
        """,
    "core/transformer/experimental_attention_variant/dsa.py": """
        import torch


        class DSAIndexerLossLoggingHelper:
            value = 0.0

            @staticmethod
            def track_indexer_metrics(loss_scale, iteration, writer, total_loss_dict=None):
                loss = torch.tensor(DSAIndexerLossLoggingHelper.value * loss_scale)
                if total_loss_dict is not None:
                    if "indexer loss" in total_loss_dict:
                        total_loss_dict["indexer loss"] += loss
                    else:
                        total_loss_dict["indexer loss"] = loss
        """,
    "core/pipeline_parallel/schedules.py": """
        def get_forward_backward_func():
            return forward_backward_no_pipelining


        def forward_backward_no_pipelining(*, forward_step_func, model):
            return forward_step_func(model)
        """,
    "core/pipeline_parallel/__init__.py": """
        from {root}.core.pipeline_parallel.schedules import get_forward_backward_func
        """,
    "training/training.py": """
        import time

        import torch
        from {root}.core.pipeline_parallel import get_forward_backward_func
        from {root}.core.transformer.experimental_attention_variant.dsa import DSAIndexerLossLoggingHelper
        from {root}.training.global_vars import get_args

        LOGGED = []


        def train_step(model, step):
            loss = get_forward_backward_func()(forward_step_func=lambda model: 5.0 - step, model=model)
            DSAIndexerLossLoggingHelper.value = 0.5 * step
            return {{"lm loss": torch.tensor(loss)}}, 0.25 * step


        {training_log}
            DSAIndexerLossLoggingHelper.track_indexer_metrics(
                loss_scale=0.5, iteration=iteration, writer=None, total_loss_dict=total_loss_dict
            )
            LOGGED.append(float(total_loss_dict["indexer loss"]))
            if iteration % 2 == 0:  # the log interval
                total_loss_dict["indexer loss"] = torch.tensor(0.0)
            return report_memory_flag


        def train(steps, model=None, pause_s=0.0):
            total_loss_dict, report_memory_flag = {{}}, "kept"
            for step in range(1, steps + 1):
                loss_dict, grad_norm = train_step(model, step)
                get_args().consumed_train_samples += 4
                report_memory_flag = {call}
                time.sleep(pause_s)  # evaluation, checkpoint
            return report_memory_flag
        """,
}
# Megatron-core 0.12 to 0.15, and from 0.16 on, which removed the parameter after `learning_rate`.
LOGS = {
    "0.15": (
        """
        def training_log(loss_dict, total_loss_dict, learning_rate, decoupled_learning_rate, iteration,
                         loss_scale, report_memory_flag, skipped_iter, grad_norm):
        """,
        "training_log(loss_dict, total_loss_dict, 1e-3, None, step, 1.0, report_memory_flag, 0, grad_norm)",
    ),
    "0.16": (
        """
        def training_log(loss_dict, total_loss_dict, learning_rate, iteration, loss_scale,
                         report_memory_flag, skipped_iter, grad_norm, pg_collection=None):
        """,
        "training_log(loss_dict, total_loss_dict, 1e-3, step, 1.0, report_memory_flag, 0, grad_norm)",
    ),
}


def write(folder: Path, release: str = "0.16", root: str = "corp_megatron") -> str:
    """Write the fork; ``release`` selects the signature of ``training_log``."""
    fork.write(folder, root)
    definition, call = (text.strip() for text in LOGS[release])
    for name, text in FILES.items():
        path = folder / root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        for parent in path.relative_to(folder).parents:
            if parent != Path():
                (folder / parent / "__init__.py").touch()
        text = textwrap.dedent(text).format(root=root, training_log=definition, call=call)
        path.write_text(text, encoding="utf-8")
    return root
