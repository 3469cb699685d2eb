"""Commands that train released models on some numbers of devices, with the plan of each command.

``python -m benchmarks.plan.recipes`` writes ``docs/recipes/``, and its table in Chinese, from the layouts in
``recipes.json``. With ``--search`` it first searches for the layouts again, which takes minutes.
"""

from __future__ import annotations

import json
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

from mindspeed_dsa.patches.errors import SettingsError
from mindspeed_dsa.tools.planner import arguments, command_lines, configs, devices, plan, search
from mindspeed_dsa.tools.planner.memory import GIB
from mindspeed_dsa.tools.planner.plan import Plan
from mindspeed_dsa.tools.planner.report import duration

DOCS = Path(__file__).parents[2] / "docs"
RECORD = Path(__file__).with_name("recipes.json")
RELEASE = "0.16.1"
"""Megatron-LM release with the model's flags; 0.14 to 0.19 have all of them."""
COUNTS = (8, 64, 256, 512)
KINDS = {"h100": ("H100", 8), "h200": ("H200", 8), "a3": ("A3 (dies)", 16)}
"""Name on pages and ranks of a node, by the planner's name."""
BATCH = 8
"""Sequences of a step per device."""
STEP = (
    "--seq-length 4096 --bf16 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather "
    "--moe-grouped-gemm --moe-token-dispatcher-type alltoall"
)
SPARSE = "--use-fused-dsa --dsa-indexer-loss-coeff 0.01 --dsa-indexer-use-sparse-loss"
LOCAL = "--transformer-impl local"
"""Flag for NPUs, which have no Transformer Engine."""
TRAINING = (
    "--optimizer adam --adam-beta2 0.95 --weight-decay 0.1 --clip-grad 1.0 --lr 1e-5 --min-lr 1e-6 "
    "--lr-decay-style cosine --train-iters 1000 --moe-router-load-balancing-type seq_aux_loss "
    "--moe-aux-loss-coeff 1e-4"
)


@dataclass(frozen=True)
class Model:
    """Released model of the table.

    Attributes:
        title: publisher's name of the model.
        released: repository of its weights.
        small: whether a small model of its kind has been trained.
    """

    title: str
    released: str
    small: bool = False


MODELS = {
    "deepseek-v3": Model("DeepSeek-V3", "deepseek-ai/DeepSeek-V3"),
    "deepseek-v3.2": Model("DeepSeek-V3.2", "deepseek-ai/DeepSeek-V3.2", small=True),
    "glm-5": Model("GLM-5", "zai-org/GLM-5"),
    "glm-5.2": Model("GLM-5.2", "zai-org/GLM-5.2", small=True),
    "kimi-k2": Model("Kimi-K2", "moonshotai/Kimi-K2-Base"),
    "moonlight": Model("Moonlight-16B", "moonshotai/Moonlight-16B-A3B"),
}


def flags_of(name: str, kind: str, count: int, layout: str = "") -> list[str]:
    """Return the flags of a recipe that a plan reads: the step, and the layout."""
    sparse = SPARSE if "index_topk" in configs.KNOWN[name] else ""
    local = LOCAL if kind == "a3" else ""
    words = f"pretrain_gpt.py {STEP} {sparse} {local} --global-batch-size {BATCH * count}"
    return [*words.split(), *shlex.split(layout or "--micro-batch-size 1")]


def searched(name: str, kind: str, count: int) -> str:
    """Return the flags of the fastest layout that fits, or the reason why none does."""
    flags = flags_of(name, kind, count)
    job = arguments.job_of(flags, count, name, any_layout=True)
    try:
        (fastest,) = search.search(job, devices.device(kind), best=1, micro=(1,))
    except SettingsError as error:
        return str(error).partition("; the closest, ")[2].partition(". Use")[0]
    words = command_lines.words_for(flags, fastest.plan.job)
    return shlex.join(words[len(flags_of(name, kind, count)) - 2 :])


def recorded() -> dict[str, dict[str, dict[str, str]]]:
    """Return flags by model, kind and number of devices, or a sentence about the closest layout."""
    found: dict[str, dict[str, dict[str, str]]] = json.loads(RECORD.read_text(encoding="utf-8"))
    return found


def planned(name: str, kind: str, count: int, layout: str) -> Plan:
    """Plan a recipe with its page's flags."""
    job = arguments.job_of(flags_of(name, kind, count, layout), count, name)
    return plan.make(job, devices.device(kind))


def pages() -> dict[str, str]:
    """Return the pages by their path in ``docs/``."""
    plans = {
        (name, kind, count): planned(name, kind, count, layout)
        for name, kinds in recorded().items()
        for kind, counts in kinds.items()
        for count, layout in ((int(each), layout) for each, layout in counts.items())
        if layout.startswith("--")
    }
    return {
        "recipes/README.md": _table(plans, _ENGLISH),
        "zh/recipes.md": _table(plans, _CHINESE),
        **{f"recipes/{name}.md": _page(name, plans) for name in MODELS},
    }


Plans = dict[tuple[str, str, int], Plan]
_ENGLISH = {
    "folder": "",
    "no": "no: ",
    "tight": ", tight",
    "planned": "planned",
    "small": "planned, small one run",
    "head": """\
# Recipes

[中文](../zh/recipes.md)

Find a layout and the complete command for a released model on 8 to 512 devices.
Each cell has the GiB of the largest rank and the planned seconds per step, and links to the command.
Jobs use bf16 and sequences of 4096 tokens, eight per device and step.
Each layout is the fastest that [`plan --search`](../planner.md) finds with micro-batches of one sequence.

| Model | Devices | H100 | H200 | A3, dies | Status |
| --- | --- | --- | --- | --- | --- |
""",
    "tail": """
* **planned**: the recipe has not been run. A tuned job's step takes between 0.8 and 1.25 of the planned time,
  and that of an untuned job [up to three times as long](../design/planner.md).
* **small one run**: a narrow model of the same kind was trained through `pretrain_gpt.py`, on two CPU ranks
  ([recipe](../megatron_lm.md)).
* **no**: no layout fits, even with full recomputation and host memory.
  The figure is the need of the closest layout.
* DeepSeek-V3, Kimi-K2 and Moonlight have dense latent attention. The others have DSA with trained indexers.
  GLM-5.1 uses the commands of GLM-5, and GLM-5.3 the commands of GLM-5.2.
* A3 has no Transformer Engine, so its commands have `--transformer-impl local`.

To reproduce the figures, run `python -m mindspeed_dsa plan --config glm-5.2 --devices 256 --device h200 --`
with the flags of a page's `STEP` and of the command.
`python -m benchmarks.plan.recipes` writes these pages, and a test compares them.
Its `--search` searches the layouts again.
""",
}
_CHINESE = {
    "folder": "../recipes/",
    "no": "放不下：",
    "tight": "，勉强",
    "planned": "规划",
    "small": "规划，小模型跑过",
    "head": """\
# 训练配方

[English](../recipes/README.md)

已发布的模型在 8 到 512 个设备上：占用最多的 rank 的 GiB、规划的一步秒数，以及到完整命令的链接\
（命令页只有英文）。\
序列长度 4096 token，每步每个设备八条，bf16。\
每种切分都是 [`plan --search`](planner.md) 在 micro-batch 为一条序列时找到的最快的一种。

| 模型 | 设备数 | H100 | H200 | A3（die） | 状态 |
| --- | --- | --- | --- | --- | --- |
""",
    "tail": """
* **规划**：还没有人跑过。调优过的作业一步的时间是规划值的 0.8 到 1.25 倍，没有调优的作业最多要三倍\
（[规划与已发布的运行](../design/planner.md)）。
* **小模型跑过**：同类的窄模型用 `pretrain_gpt.py` 在两个 CPU rank 上训练过（[做法](megatron_lm.md)）。
* **放不下**：无论重计算什么、把什么搬到主机，都放不下；给出的是最接近的切分需要多少。
* DeepSeek-V3、Kimi-K2 和 Moonlight 用稠密的 latent attention；其余的用 DSA，indexer 参与训练。\
GLM-5.1 的命令与 GLM-5 相同，GLM-5.3 的与 GLM-5.2 相同。
* A3 上没有 Transformer Engine，因此命令里有 `--transformer-impl local`。

重新得到这些数值：`python -m mindspeed_dsa plan --config glm-5.2 --devices 256 --device h200 --`，\
后面接该模型页里 `STEP` 和命令中的参数。\
`python -m benchmarks.plan.recipes` 写出这些页面，并有测试核对；加 `--search` 则重新搜索切分。
""",
}


def _table(plans: Plans, words: dict[str, str]) -> str:
    rows = []
    for name, model in MODELS.items():
        for count in COUNTS:
            cells = (_cell(name, kind, count, plans, words) for kind in KINDS)
            status = words["small" if model.small else "planned"]
            page = f"{words['folder']}{name}.md"
            rows.append(f"| [{model.title}]({page}) | {count} | {' | '.join(cells)} | {status} |")
    return f"{words['head']}{chr(10).join(rows)}\n{words['tail']}"


def _cell(name: str, kind: str, count: int, plans: Plans, words: dict[str, str]) -> str:
    made = plans.get((name, kind, count))
    if made is None:
        return f"{words['no']}{recorded()[name][kind][str(count)].rpartition('needs ')[2]}"
    tight = words["tight"] if made.verdict == plan.TIGHT else ""
    figures = f"{made.worst.total / GIB:.0f} GiB, {duration(made.time.total)} s{tight}"
    return f"[{figures}]({words['folder']}{name}.md#{_anchor(kind, count)})"


def _anchor(kind: str, count: int) -> str:
    return f"{count}-{KINDS[kind][0]}".lower().replace(" ", "-").replace("(", "").replace(")", "")


def _page(name: str, plans: Plans) -> str:
    model, plans_by_devices = MODELS[name], {key[1:]: made for key, made in plans.items() if key[0] == name}
    job = next(iter(plans_by_devices.values())).job
    sparse = SPARSE if job.model.sparse else ""
    lines = [
        f"# {model.title}",
        "",
        "[All recipes](README.md) explains the figures. All commands share these settings, for",
        f"`{model.released}` on Megatron-LM 0.14 and later:",
        "",
        "```",
        "export CUDA_DEVICE_MAX_CONNECTIONS=1",
        "RUN=(examples/megatron_lm/run_megatron.py $MEGATRON_LM/pretrain_gpt.py)",
        "DATA=(--data-path my_text --tokenizer-type HuggingFaceTokenizer --tokenizer-model my_tokenizer)",
        *_array("MODEL", configs.flags_of(Path(name), set(), job, RELEASE)),
        *_array("STEP", [f"{STEP} {sparse}"]),
        *_array("TRAINING", [TRAINING]),
        "```",
    ]
    for (kind, count), made in sorted(
        plans_by_devices.items(), key=lambda each: (list(KINDS).index(each[0][0]), each[0][1])
    ):
        lines += ["", *_recipe(name, kind, count, made)]
    lacking = [
        f"{count} {KINDS[kind][0]}" for kind in KINDS for count in COUNTS if (name, kind, count) not in plans
    ]
    if lacking:
        lines += ["", f"It does not fit on {', '.join(lacking)}, even with full recomputation and offload."]
    return "\n".join([*lines, ""])


def _array(name: str, flags: list[str]) -> list[str]:
    """Return a shell's array of flags."""
    words = [word for line in flags for word in shlex.split(line)]
    shown = command_lines.shown(words, indent="    ")
    first, *rest = [line.removesuffix(" \\").strip() for line in shown]
    return [f"{name}=({first}", *(f"    {line}" for line in rest[:-1]), f"    {rest[-1]})"]


def _recipe(name: str, kind: str, count: int, made: Plan) -> list[str]:
    title, ranks = KINDS[kind]
    share = f"{made.worst.host / GIB:.0f} GiB a rank on the host, " if made.worst.host else ""
    shared = len(f"pretrain_gpt.py {STEP} {SPARSE if made.job.model.sparse else ''}".split())
    layout = flags_of(name, kind, count, recorded()[name][kind][str(count)])[shared:]
    start = f"torchrun --nnodes {count // ranks} --nproc-per-node {ranks} --rdzv-backend c10d"
    if count <= ranks:
        start = f"torchrun --standalone --nproc-per-node {count}"
    else:
        start += ' --rdzv-endpoint "$HEAD:29500"'
    return [
        f"## {count} {title}",
        "",
        (
            f"{made.job.layout}: {made.verdict}, {made.worst.total / GIB:.1f} GiB of {made.device.memory:g}, "
            f"{share}{duration(made.time.total)} s a step, limited by {made.time.limit}."
        ),
        "",
        "```",
        f"{start} \\",
        '    "${RUN[@]}" "${MODEL[@]}" "${STEP[@]}" "${TRAINING[@]}" "${DATA[@]}" \\',
        *(f"    {line.strip()}" for line in command_lines.shown(layout)),
        "```",
    ]


def write() -> None:
    """Write all pages."""
    (DOCS / "recipes").mkdir(exist_ok=True)
    for name, text in pages().items():
        (DOCS / name).write_text(text, encoding="utf-8")


def main(argv: list[str]) -> None:
    """Search if requested, and write the pages."""
    if "--search" in argv:
        layouts = {
            name: {kind: {str(count): searched(name, kind, count) for count in COUNTS} for kind in KINDS}
            for name in MODELS
        }
        RECORD.write_text(json.dumps(layouts, indent=1) + "\n", encoding="utf-8")
    write()


if __name__ == "__main__":
    main(sys.argv[1:])
