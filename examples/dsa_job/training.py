"""The job: build everything, train, evaluate, save, report."""

from __future__ import annotations

import argparse
import contextlib
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue

import mindspeed_dsa
from dsa_job import checkpoint, checkpoints, data, distributed, weights
from dsa_job.errors import Interrupted, JobError, UsageError
from dsa_job.folders import Run
from dsa_job.model import build_model, build_optimizer, build_scheduler, model_config
from dsa_job.reporting import Account, ExpertLoad, Record, Reporter
from dsa_job.runs import save_folder, saves_where_it_loads
from dsa_job.step import Stepper
from dsa_job.text import Corpus
from dsa_job.tokenizers import build_tokenizer
from dsa_job.validation import World, padded_vocab_size
from mindspeed_dsa import session
from mindspeed_dsa.features.dsa.selections.record import start_at
from mindspeed_dsa.megatron.dsa import Options
from mindspeed_dsa.megatron.selections import Sharing
from mindspeed_dsa.runs.files import RunError

OnEnd = Callable[[Stepper], None]
_PATIENCE_S = 5.0  # torchrun forwards the terminal's signal, so that it arrives twice


def train(
    args: argparse.Namespace, on_end: OnEnd | None = None, run: Run | None = None, quiet: bool = True
) -> list[Record]:
    """Run the job and return one record per step made by this call, on every rank.

    Creates process groups unless they exist, and destroys the ones that it created, so that one process can
    run any number of jobs one after the other. Features must be enabled before.

    Args:
        args: arguments from :func:`dsa_job.arguments.parse_args`, checked by
            :func:`dsa_job.validation.check`.
        on_end: function called after the last step, while model and optimizer still exist.
        run: run's folder, on rank 0; without it only checkpoints are written, to ``--save``.
        quiet: whether to print nothing.
    """
    joined = distributed.initialize(args, World.from_environment())
    try:
        completed = distributed.from_rank_0(lambda: _complete(args, run))
        resumed = completed.pop("resumed")
        args = argparse.Namespace(**{**vars(args), **completed})
        with _deterministic(args), distributed.model_parallel(args), _ctrl_c() as interrupts:
            records = _Job(args, run, resumed, interrupts, quiet).run(on_end)
    except (JobError, mindspeed_dsa.MindSpeedDSAError):  # raised on every rank
        _leave(joined)
        raise
    _leave(joined)
    return records


def _leave(joined: bool) -> None:
    if joined and dist.is_initialized():
        dist.destroy_process_group()


def _complete(args: argparse.Namespace, run: Run | None) -> dict[str, Any]:
    """Return arguments that follow from the run's folder, and whether it is ``resumed``; runs on rank 0."""
    resumed = run is not None and run.resumed
    save, load, cache = args.save, args.load, args.data_cache_path
    if run is not None:
        save = str(save_folder(args, run.folder))
        load = save if resumed else load
        cache = cache or str(Path(args.output_dir) / "data-cache")
    save = None if args.no_save else save
    completed = {"save": save, "load": load, "data_cache_path": cache, "resumed": resumed}
    if resumed:  # the run's starting point no longer matters
        completed.update(ckpt_step=None, finetune=False, no_load_optim=False, no_load_rng=False)
    if not args.train_iters:  # initial weights: there is no other state yet
        completed.update(no_save_optim=True, no_save_rng=True)
    return completed


@contextlib.contextmanager
def _deterministic(args: argparse.Namespace) -> Iterator[None]:
    """Add in a fixed order; otherwise some sums on a CPU with several threads vary."""
    before = torch.get_deterministic_debug_mode()
    fill = torch.utils.deterministic.fill_uninitialized_memory
    if args.deterministic_mode:
        torch.set_deterministic_debug_mode("warn")
        torch.utils.deterministic.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before)
        torch.utils.deterministic.fill_uninitialized_memory = fill


@contextlib.contextmanager
def _ctrl_c() -> Iterator[list[float]]:
    """Yield the times of every Ctrl-C, so that the step can end after the first; a later one ends at once."""
    times: list[float] = []

    def handle(number: int, frame: FrameType | None) -> None:
        times.append(time.monotonic())
        if times[-1] - times[0] > _PATIENCE_S:
            raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():  # only the main thread handles signals
        yield times
        return
    before = signal.signal(signal.SIGINT, handle)
    try:
        yield times
    finally:
        signal.signal(signal.SIGINT, before)


class _Job:
    """State of one job that needs its process groups."""

    def __init__(
        self, args: argparse.Namespace, run: Run | None, resumed: bool, interrupts: list[float], quiet: bool
    ) -> None:
        self.args, self.resumed, self.interrupts = args, resumed, interrupts
        self.start = time.monotonic()
        folder = run.folder if run is not None else None
        seed = distributed.seed(args)
        random.seed(seed)
        # numpy accepts seeds of 32 bits only.
        np.random.seed(seed % 2**32)
        torch.manual_seed(seed)
        tokenizer = build_tokenizer(args.tokenizer_model)
        args.vocab_size = tokenizer.vocab_size
        args.padded_vocab_size = padded_vocab_size(args, tokenizer.vocab_size)
        self.corpus: Corpus | None = None
        if args.train_iters:
            self.corpus = distributed.from_rank_0(lambda: data.build_corpus(args, tokenizer))
            self.train_data, self.heldout_data = data.build_datasets(args, tokenizer, self.corpus)
        self.expert_load = ExpertLoad()
        mindspeed_dsa.finalize(str(folder) if folder else None)
        config = model_config(args)
        model = _build(args, config)
        weights.read(args, model)
        self.account = Account(model)
        optimizer = build_optimizer(args, model)
        self.stepper = Stepper(args, config, model, optimizer, build_scheduler(args, optimizer))
        self.progress = checkpoint.Progress()
        self.saves: Any = AsyncCallsQueue()
        if args.save and dist.get_rank() == 0:
            checkpoints.remove_partial(Path(args.save))
        if args.load:
            self._load()
        # Do not write a checkpoint loaded from --save again, perhaps with less in it.
        self.saved = self.progress.iteration if saves_where_it_loads(args) else None
        self.wall_before = self.progress.wall_s
        self.reporter = Reporter(args, folder, self.progress.iteration, quiet)

    def _load(self) -> None:
        args, stepper = self.args, self.stepper

        def chosen() -> Path:
            folder, passed = checkpoints.find(Path(args.load), args.ckpt_step, args.verify_checkpoint)
            if passed:
                print(f"checkpoint: {passed}", flush=True)
            checkpoint.check_fits(args, folder)
            return folder

        folder = distributed.from_rank_0(chosen)
        self.progress = checkpoint.load(args, folder, stepper.model, stepper.optimizer, stepper.scheduler)

    def run(self, on_end: OnEnd | None) -> list[Record]:
        records: list[Record] = []
        try:
            self._introduce()
            if self.args.train_iters:
                self._steps(records)
            if self.args.save and self.saved != self.progress.iteration:
                self._save()
            self._finish_saves(wait=True)
            if self.args.save and self.progress.iteration >= self.args.train_iters:
                weights.write(self.args, self.progress.iteration)
            if on_end is not None:
                on_end(self.stepper)
            if self.corpus is not None and self.progress.iteration >= self.args.train_iters:
                self.reporter.finish(self.corpus.unigram_entropy, self._wall(), self.account.lines())
        except (JobError, mindspeed_dsa.MindSpeedDSAError):  # raised on every rank
            try:
                self._finish_saves(wait=True)
            except RunError as error:
                self.reporter.say(str(error))
            raise
        finally:
            self.reporter.close()
            self.stepper.release()
        return records

    def _introduce(self) -> None:
        args, say = self.args, self.reporter.say
        dtype = "bfloat16" if args.bf16 else "float32"
        total = sum(parameter.numel() for chunk in self.stepper.model for parameter in chunk.parameters())
        say(f"model: {args.num_layers} layers, {total:,} parameters on rank 0, {dtype}")
        if args.experimental_attention_variant == "dsa":
            sharing = Sharing.of(args)
            selecting = [layer for layer in range(1, args.num_layers + 1) if sharing.computes(layer)]
            those = (
                f" in layers {', '.join(map(str, selecting))}; the others attend to the same"
                if sharing.is_on
                else ""
            )
            does = {
                "dense": "dense attention: nothing reads or trains {heads}",
                "warmup": "dense attention: {heads} learn to choose {keys}",
                "sparse": "sparse attention: {heads} choose {keys}",
                "frozen": "sparse attention: {heads}, which are not trained, choose {keys}",
            }[Options.of(args).stage]
            keys = f"{args.dsa_indexer_topk} of up to {args.seq_length} keys{those}"
            say(does.format(heads=f"{args.dsa_indexer_n_heads} index heads", keys=keys))
        if self.progress.fresh_optimizer:
            say(f"checkpoint: {args.load} provides the weights only; the optimizer starts without its state")
        if self.corpus is not None:
            say(f"data: {self.corpus}")

    def _steps(self, records: list[Record]) -> None:
        args, progress = self.args, self.progress
        chunks = len(self.stepper.model)
        stream = data.batches(args, self.train_data, progress.consumed_train_samples, chunks)
        if not self.resumed:
            self._evaluate()
        self.reporter.start(progress.iteration)
        running = session.current()
        recorded = None if running is None else running.contexts.get("dsa-recorded-selections")
        if recorded is not None:
            start_at(recorded, progress.iteration + 1)
        while progress.iteration < args.train_iters:
            record = self._step(stream)
            records.append(record)
            self.reporter.step(record)
            self._finish_saves(wait=False)
            step, last = progress.iteration, progress.iteration == args.train_iters
            if last or (args.eval_interval and step % args.eval_interval == 0):
                self._evaluate()
            if args.save and args.save_interval and step % args.save_interval == 0 and not last:
                self._save()
            # A signal may reach ranks in different steps; the collective makes all of them stop after the
            # same one.
            if distributed.any_rank(bool(self.interrupts)) and not last:
                self._stop_for_ctrl_c()
            if args.exit_interval and step % args.exit_interval == 0:
                return

    def _step(self, stream: list[Iterator[data.Batch]]) -> Record:
        args, progress = self.args, self.progress
        begin = time.perf_counter()
        lm_loss, indexer_loss, grad_norm = self.stepper.train_step(progress.iteration + 1, stream)
        # Wait for the device, so that the time covers the whole step.
        torch.cuda.synchronize()
        seconds = time.perf_counter() - begin
        progress.iteration += 1
        progress.consumed_train_samples += args.global_batch_size
        self.expert_load.step(progress.iteration)
        return {
            "step": progress.iteration,
            "lm_loss": lm_loss,
            "indexer_loss": indexer_loss,
            "grad_norm": grad_norm,
            "tokens_per_s": args.global_batch_size * args.seq_length / seconds,
            "step_time_s": seconds,
            "peak_memory_bytes": distributed.max_over_ranks(torch.cuda.max_memory_allocated()),
        }

    def _evaluate(self) -> None:
        if self.heldout_data is None:
            return
        # Use the same samples every time, so that the losses can be compared.
        stream = data.batches(self.args, self.heldout_data, 0, len(self.stepper.model))
        self.reporter.evaluation(self.progress.iteration, self.stepper.evaluate(stream, self.args.eval_iters))

    def _wall(self) -> float:
        return self.wall_before + time.monotonic() - self.start

    def _save(self) -> None:
        """Finish the previous save, then save; training continues meanwhile unless ``--no-async-save``."""
        self._finish_saves(wait=True)
        self.progress.wall_s = distributed.max_over_ranks(self._wall())
        stepper, folder, step = self.stepper, Path(self.args.save), self.progress.iteration
        # An overlapped gather completes the parameters only in the next forward pass.
        with stepper.complete_parameters():
            request = checkpoint.save(
                self.args, folder, self.progress, stepper.model, stepper.optimizer, stepper.scheduler
            )
            request.add_finalize_fn(
                lambda: self.reporter.say(f"step {step:>5} | saved {checkpoints.folder_of(folder, step)}")
            )
            if self.args.async_save:
                self.saves.schedule_async_request(request)
            else:
                request.execute_sync()
        self.saved = step
        if self.args.save_hf_interval and step % self.args.save_hf_interval == 0:
            self._finish_saves(wait=True)
            weights.write(self.args, step)

    def _finish_saves(self, wait: bool) -> None:
        """Publish checkpoints whose files are written; all ranks call this together.

        Args:
            wait: whether to wait for all of them.
        """
        if self.saves.get_num_unfinalized_calls():
            self.saves.maybe_finalize_async_calls(blocking=wait)

    def _stop_for_ctrl_c(self) -> None:
        stopped = f"stopped by Ctrl-C after step {self.progress.iteration}"
        if not self.args.save:
            raise Interrupted(f"{stopped}; nothing was saved (--no-save)")
        if self.saved != self.progress.iteration:
            self._save()
        self._finish_saves(wait=True)
        raise Interrupted(f"{stopped}; a checkpoint is in {self.args.save}; the same command resumes from it")


def _build(args: argparse.Namespace, config: Any) -> list[Any]:
    """Build the model; if Megatron needs a repair that is switched off, the error names the switch."""
    try:
        return build_model(args, config)
    except mindspeed_dsa.MindSpeedDSAError:
        raise
    except (ValueError, AssertionError) as error:
        if not args.no_dsa_repairs:
            raise
        raise UsageError(
            f"Megatron cannot build this model ({error}) without the repairs that --no-dsa-repairs "
            f"{args.no_dsa_repairs} leaves out; omit it"
        ) from error
