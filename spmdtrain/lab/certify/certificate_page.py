"""Renders the certificate as a self-contained page, without scripts.

A row is a layout, and a dot one of its figures, on a logarithmic axis of "times what rounding
does". Beyond the line at 8 a figure is wrong.
"""

import html
import math
from collections import Counter
from collections.abc import Sequence

from spmdtrain.lab.certify.certify import Certificate, Examined
from spmdtrain.lab.certify.compare import MARGIN
from spmdtrain.lab.certify.witnesses.own_precision import TOKENS
from spmdtrain.lab.certify.witnesses.witness import Witness

LEAST, MOST = -3, 8  # powers of ten on the axis
WIDE = 1000  # units of the axis
STEP = 6  # units that one dot stands for
STYLE = """
:root{color-scheme:light dark;--ink:#1b1f24;--dim:#5b6470;--paper:#fff;--line:#d8dde3;--dot:#1f6feb;
--bad:#b42318;--good:#18794e}
@media (prefers-color-scheme:dark){:root{--ink:#e6eaef;--dim:#9aa4b0;--paper:#14181d;--line:#333b45;
--dot:#6cb0ff;--bad:#ff8a7a;--good:#5fd39b}}
@media print{:root{color-scheme:light}}
body{font:15px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--paper);margin:0 auto;
max-width:1100px;padding:24px 16px}
h1{font-size:26px;margin:0 0 4px}h2{font-size:18px;margin:32px 0 8px}
.dim{color:var(--dim);font-size:13px;font-weight:400}.good{color:var(--good)}.bad{color:var(--bad)}
.scroll{overflow-x:auto}table{border-collapse:collapse;width:100%;min-width:640px}
th,td{text-align:left;vertical-align:top;padding:6px 8px;border-bottom:1px solid var(--line)}
th[scope=row]{max-width:300px}td.strip{width:42%;min-width:220px}
svg{display:block;width:100%;height:26px;overflow:visible}
.grid{stroke:var(--line);stroke-width:1}.limit{stroke:var(--bad);stroke-width:2}
.dot{stroke:var(--dot);stroke-linecap:round}.wrong{stroke:var(--bad)}
svg path{vector-effect:non-scaling-stroke;fill:none}
.axis{display:flex;justify-content:space-between}code{font-size:13px;overflow-wrap:anywhere}
"""


def page(certificate: Certificate, name: str, facts: Sequence[tuple[str, str]]) -> str:
    """Returns the page. `name`: of the run; `facts`: rows of (what, value), versions and the like.

    Every text is escaped, because names come from files.
    """
    verdict = "certified" if certificate.is_certified else "refused"
    kind = "good" if certificate.is_certified else "bad"
    figures = sum(len(examined.ratios) for examined in certificate.layouts)
    lead = (
        f"{len(certificate.layouts)} layouts take {certificate.steps} steps from the states of one "
        f"device; {figures:,} figures are compared. A dot right of the line at {MARGIN:g} is more "
        f"than {MARGIN:g} times as far as rounding moves that figure. In small: "
        f"{certificate.shrunk.words}."
    )
    rows = "".join(_row(examined) for examined in certificate.layouts)
    parts = [
        f'<h1>{_text(name)}: <span class="{kind}">{verdict}</span></h1><p>{_text(lead)}</p>',
        f'<h2>Layouts</h2><div class="scroll"><table><thead><tr><th>layout</th><th>{_axis()}</th>'
        f"<th>verdict, and its worst figure</th></tr></thead><tbody>{rows}</tbody></table></div>",
        _list("What one device may have wrong too", certificate.witnesses),
        _list("Resuming", certificate.resume),
        _list("Text and size", certificate.others),
        _lost(certificate),
        _facts(facts),
    ]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" '
        'content="width=device-width,initial-scale=1"><meta http-equiv="Content-Security-Policy" '
        "content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<title>{_text(name)}: {verdict}</title><style>{STYLE}</style></head><body>"
        f"{''.join(parts)}</body></html>\n"
    )


def _text(text: str) -> str:
    return html.escape(str(text))


def _place(ratio: float) -> float:
    power = math.log10(max(ratio, 10.0**LEAST)) if ratio < math.inf else MOST
    return WIDE * (min(max(power, LEAST), MOST) - LEAST) / (MOST - LEAST)


def _axis() -> str:
    marks = ("≤ 0.001", "1 × rounding", "10⁴", "≥ 10⁸")
    return f'<div class="axis dim">{"".join(f"<span>{mark}</span>" for mark in marks)}</div>'


def _strip(examined: Examined) -> str:
    """Returns the dots of a layout; a dot for more figures is larger."""
    counts = Counter(round(_place(ratio) / STEP) for ratio in examined.ratios)
    dots = "".join(
        f'<path class="dot{" wrong" if at * STEP > _place(MARGIN) else ""}" '
        f'style="stroke-width:{min(3 + math.sqrt(count), 11):.1f}" d="M{at * STEP} 13h0.01"/>'
        for at, count in sorted(counts.items())
    )
    worst = f"{examined.ratios[0]:.2g}" if examined.ratios else "none"
    label = f"{len(examined.ratios)} figures, the worst {worst} times what rounding does"
    return (
        f'<svg viewBox="0 0 {WIDE} 26" preserveAspectRatio="none" role="img" '
        f'aria-label="{_text(label)}"><path class="grid" d="M0 13H{WIDE}"/>'
        f'<path class="limit" d="M{_place(MARGIN):.1f} 0V26"/>{dots}</svg>'
    )


def _row(examined: Examined) -> str:
    kind = {"agrees": "good", "differs": "bad", "broken": "bad"}.get(examined.verdict, "dim")
    text = examined.details or (str(examined.first) if examined.first is not None else "")
    if examined.verdict == "differs":
        text = f"{text}; {examined.wrong} of {len(examined.ratios)} figures differ"
    if examined.verdict == "agrees":
        text = f"worst {examined.ratios[0]:.1f} × rounding: {text}"
    return (
        f'<tr><th scope="row">{_text(examined.layout.name)}<div class="dim">{examined.layout.why}, '
        f"{_text(examined.precision)}</div></th>"
        f'<td class="strip">{_strip(examined)}</td><td><b class="{kind}">{examined.verdict}</b>'
        f'<div class="dim">{_text(text)}</div></td></tr>'
    )


def _list(title: str, witnesses: Sequence[Witness]) -> str:
    if not witnesses:
        return ""
    words = {True: ("good", "holds"), False: ("bad", "fails"), None: ("dim", "not asked")}
    items = "".join(
        f'<li><span class="{words[witness.holds][0]}">{words[witness.holds][1]}</span>: '
        f'{_text(witness.name)} <span class="dim">{_text(witness.details)}</span></li>'
        for witness in witnesses
    )
    return f"<h2>{title}</h2><ul>{items}</ul>"


def _lost(certificate: Certificate) -> str:
    items = "".join(f"<li>{_text(limit)}</li>" for limit in not_proved(certificate))
    return f"<h2>What this does not prove</h2><ul>{items}</ul>"


def not_proved(certificate: Certificate) -> list[str]:
    """Returns the limits of the certificate, a line each."""
    width = certificate.shrunk.config.model.embed
    missed = [
        examined.layout.name
        for examined in certificate.layouts
        if examined.verdict == "not reached"
    ]
    refused = [
        examined.layout.name for examined in certificate.layouts if examined.verdict == "refused"
    ]
    lines = [
        *certificate.shrunk.lost,
        *certificate.mixing_remarks,
        *(f"{name}: the budget was used up" for name in missed),
        *(f"{name}: refused by the trainer itself" for name in refused),
        f"Kernels that are chosen by shape or for a GPU: this is width {width} on a CPU. "
        "spmdtrain doctor --measure compares kernels.",
        f"Ids beyond 2^31, long sequences, and sums in 16 bits over more than {TOKENS:,} tokens of "
        "a device: they show at the real size only.",
        "Other optimizers, losses and schedules than those of this run.",
        "That the settings train a good model.",
    ]
    if all(examined.precision == "float32" for examined in certificate.layouts):
        lines.append("Layouts in the run's own precision: --precision asked compares them too.")
    return lines


def _facts(facts: Sequence[tuple[str, str]]) -> str:
    rows = "".join(
        f'<tr><th scope="row">{_text(what)}</th><td><code>{_text(value)}</code></td></tr>'
        for what, value in facts
    )
    return f'<h2>Made with</h2><div class="scroll"><table><tbody>{rows}</tbody></table></div>'
