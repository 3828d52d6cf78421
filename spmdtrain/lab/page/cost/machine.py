"""Shows what a step costs its devices: memory, and traffic on the network."""

from collections import defaultdict
from typing import Any

from spmdtrain.lab.page.columns import known
from spmdtrain.lab.page.formats import safe, share, size
from spmdtrain.lab.page.read import RunRead, is_number


def memory(run: RunRead) -> str:
    """Returns bars of a device's memory: predicted, compiled and measured, as far as known."""
    compiled = numbers_in(run.compiled.get("memory"))
    bars: list[tuple[str, dict[str, float]]] = []
    if predicted := numbers_in(run.predicted.get("memory_bytes")):
        predicted.pop("total", None)
        bars.append((f"predicted for {run.predicted.get('hardware', '?')}", predicted))
    if {"argument_bytes", "output_bytes", "alias_bytes", "temp_bytes"} <= compiled.keys():
        outputs = compiled["output_bytes"] - compiled["alias_bytes"]
        parts = {
            "weights and optimizer": compiled["argument_bytes"],
            "temporary": compiled["temp_bytes"],
            "outputs": max(outputs, 0.0),
        }
        bars.append(("compiled, by XLA's account", parts))
    held = known(run.steps["memory_bytes"])
    if len(held):
        bars.append(("measured by the allocator", {"held at most": float(held.max())}))
    if not bars:
        return ""
    top = max(sum(parts.values()) for _, parts in bars) or 1.0
    rows = "".join(_bar(name, parts, top) for name, parts in bars)
    note = "" if len(held) else "<p class=dim>Not measured: a CPU's allocator does not tell.</p>"
    return f"<div class=scroll><table class=memory><tbody>{rows}</tbody></table></div>{note}"


def _bar(name: str, parts: dict[str, float], top: float) -> str:
    order = sorted(parts.items(), key=lambda item: -item[1])
    pieces = "".join(
        f'<i class="m{at % 6}" style="width:{100 * count / top:.2f}%"></i>'
        for at, (_, count) in enumerate(order)
        if count > 0
    )
    legend = ", ".join(
        f'<span class=part><i class="swatch m{at % 6}"></i>{safe(part.replace("_", " "))} '
        f"{size(count)}</span>"
        for at, (part, count) in enumerate(order)
        if count > 0
    )
    return (
        f"<tr><th scope=row>{safe(name)}</th><td class=bar><div>{pieces}</div>"
        f"<p class=dim>{legend}</p></td><td class=num>{size(sum(parts.values()))}</td></tr>"
    )


def ledger(run: RunRead) -> str:
    """Returns a table of what a device sends in a step by mesh axis, or "" if it sends nothing.

    If a loop runs an unknown number of times, the collectives of its body are listed once.
    """
    sent: dict[str, float] = defaultdict(float)
    hidden: dict[str, float] = defaultdict(float)
    kinds: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for operation in run.compiled.get("traffic") or ():
        match operation:
            case {"axis": str(axis), "kind": str(kind), "sent": count, "sent_beside_work": beside}:
                if is_number(count) and is_number(beside) and count > 0:
                    sent[axis] += count
                    hidden[axis] += beside
                    kinds[axis][kind] += count
    if not sent:
        return _ledger_of_text(run) if run.compiled.get("traffic") is None else ""
    top = max(sent.values())
    rows = []
    for axis, count in sorted(sent.items(), key=lambda item: -item[1]):
        made_of = ", ".join(
            f"{safe(kind)} {size(part)}"
            for kind, part in sorted(kinds[axis].items(), key=lambda item: -item[1])
        )
        rows.append(
            f"<tr><th scope=row>{safe(axis.replace('+', ' + '))}</th><td class=bar><div>"
            f'<i class="m2" style="width:{100 * hidden[axis] / top:.2f}%"></i>'
            f'<i class="m3" style="width:{100 * (count - hidden[axis]) / top:.2f}%"></i></div></td>'
            f"<td class=num>{size(count)}</td><td class=num>{share(hidden[axis], count)}</td>"
            f"<td class=wide>{made_of}</td></tr>"
        )
    return (
        "<div class=scroll><table class=ledger><thead><tr><th>axis</th><th></th>"
        "<th class=num>sent</th><th class=num>hidden</th><th class=wide>made of</th></tr></thead>"
        f"<tbody>{''.join(rows)}</tbody><tfoot><tr><th scope=row>all</th><td></td>"
        f"<td class=num>{size(sum(sent.values()))}</td><td></td><td class=wide></td></tr></tfoot>"
        "</table></div><p class=dim>What a device sends in a step, counted in the compiled "
        "program, loops by how often they run. Hidden: a matmul or a loop stands between start "
        "and end; the CPU's compiler hides nothing.</p>"
    )


def _ledger_of_text(run: RunRead) -> str:
    """Returns a table of the collectives in the program's text, with the body of a loop once."""
    rows = []
    for operation in run.compiled.get("collectives") or ():
        match operation:
            case {"axis": str(axis), "kind": str(kind), "count": count, "bytes": held} if is_number(
                count
            ) and is_number(held):
                place = "a loop" if operation.get("inside_loop") else "the step"
                rows.append(
                    f"<tr><th scope=row>{safe(axis.replace('+', ' + '))}</th><td>{safe(kind)}</td>"
                    f"<td class=num>{count:,.0f}</td><td class=num>{size(held)}</td>"
                    f"<td>{place}</td></tr>"
                )
    if not rows:
        return ""
    return (
        "<div class=scroll><table class=ledger><thead><tr><th>axis</th><th>kind</th>"
        "<th class=num>number</th><th class=num>bytes</th><th>inside</th></tr></thead>"
        f"<tbody>{''.join(rows)}</tbody></table></div><p class=dim>Outputs on one device in one "
        "pass through the compiled program. How much a step sends is not known: how often a loop "
        "runs depends on the data, as where experts exchange tokens until none is left.</p>"
    )


def numbers_in(value: Any) -> dict[str, float]:
    """Returns the entries of a JSON object that are numbers, 0 or more."""
    items = value.items() if isinstance(value, dict) else ()
    return {str(name): float(number) for name, number in items if is_number(number) and number >= 0}
