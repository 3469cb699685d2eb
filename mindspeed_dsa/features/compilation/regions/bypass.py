"""Operators that stay whole in compiled code: neither decomposed nor fused.

The compiler takes an operator apart where it knows how. It does not know those of a library that only
forward to the ATen ones, and calls them as they are.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch

from mindspeed_dsa.feature import Context
from mindspeed_dsa.features.compilation.regions.feature import Options
from mindspeed_dsa.patches import versions
from mindspeed_dsa.patches.errors import SettingsError

Operator = torch._ops.OpOverload
_USER = "--compile-bypass"
_all_op_names = versions.private("torch._C:_dispatch_get_all_op_names", _USER)
_has_kernel_for = versions.private("torch._C:_dispatch_has_kernel_for_dispatch_key", _USER)
_NAMESPACE = "mindspeed_dsa_bypass"


def check_operators(context: Context[Options]) -> None:
    """Refuse, before the model is built, a name that no operator has.

    Raises:
        SettingsError: from :func:`resolve`.
    """
    resolve(context.options.bypass)


@cache
def resolve(names: tuple[str, ...]) -> tuple[Operator, ...]:
    """Return the operators of these names, all overloads: ``silu``, ``aten.silu`` or ``aten.silu.default``.

    Raises:
        SettingsError: there is none of the name, or it cannot stay whole.
    """
    return tuple(operator for name in names for operator in _overloads(name))


def _overloads(name: str) -> Sequence[Operator]:
    given, _, overload = name.removeprefix("aten.").partition(".")
    packet = getattr(torch.ops.aten, given, None)
    if packet is None or (overload and overload not in packet.overloads()):
        known = sorted({each.split("::")[1].partition(".")[0] for each in _all_names()})
        near = difflib.get_close_matches(given, known, n=1, cutoff=0.0)
        raise SettingsError(f"--compile-bypass: ATen has no operator {name}; the nearest is {near[0]}")
    found = [getattr(packet, each) for each in ([overload] if overload else packet.overloads())]
    usable = [operator for operator in found if _is_pure(operator)]
    if not usable:
        raise SettingsError(
            f"--compile-bypass: {name} returns a view or works in place, which the compiler sees to itself; "
            "omit it"
        )
    whole = [operator for operator in usable if not _is_made_of_others(operator)]
    if not whole:
        raise SettingsError(
            f"--compile-bypass: {name} is made of other operators before a compiler sees it; name those"
        )
    return whole


def _all_names() -> list[str]:
    names: list[str] = _all_op_names()
    return [name for name in names if name.startswith("aten::") and not name.startswith("aten::_")]


def _is_pure(operator: Operator) -> bool:
    schema = operator._schema
    return not any(each.alias_info for each in (*schema.arguments, *schema.returns))


def _is_made_of_others(operator: Operator) -> bool:
    composite: bool = _has_kernel_for(operator.name(), "CompositeImplicitAutograd")
    return composite


def arguments(operators: Sequence[Operator]) -> dict[str, Any]:
    """Return arguments of Inductor's ``compile_fx`` that let operators stay whole."""
    if not operators:
        return {}
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.decomposition import select_decomp_table

    kept = set(operators)

    def compile_rest(graph: torch.fx.GraphModule, inputs: Sequence[Any], **named: Any) -> Any:
        for node in graph.graph.nodes:
            if node.op == "call_function" and node.target in kept:
                node.target = _forwarder(node.target)
        graph.recompile()
        return compile_fx_inner(graph, inputs, **named)

    table = {each: how for each, how in select_decomp_table().items() if each not in kept}
    return {"inner_compile": compile_rest, "decompositions": table}


@cache
def _library() -> torch.library.Library:
    return torch.library.Library(_NAMESPACE, "DEF")


@cache
def _forwarder(operator: Operator) -> Callable[..., Any]:
    """Build an operator of our own with the same signature that does nothing but call it."""
    name = operator.name().replace("::", "_").replace(".", "_")
    signature = str(operator._schema).partition("(")[2]
    tags = (torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout)
    _library().define(f"{name}({signature}", tags=tags)

    def forward(*args: Any, **kwargs: Any) -> Any:
        return operator(*args, **kwargs)

    _library().impl(name, forward, "CompositeExplicitAutograd")
    return getattr(getattr(torch.ops, _NAMESPACE), name).default  # type: ignore[no-any-return]
