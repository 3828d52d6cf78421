"""The pictures that no command of ours draws, each drawn from what the code itself computes."""

import itertools
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from drawing import BLUE, FAINT, GREEN, GREY, INK, ORANGE, PURPLE, STRONG, Drawing

from spmdtrain.checkpoints.retention import Retention
from spmdtrain.config.schema import CheckpointConfig, RunConfig
from spmdtrain.data.batches import Range
from spmdtrain.data.chats.conversation import of_messages
from spmdtrain.data.chats.simple_template import CHATML, SimpleTemplate
from spmdtrain.data.packing import pack_documents
from spmdtrain.data.tokenizers.tokenizer import ByteTokenizer
from spmdtrain.lab.page.columns import smoothed, thinned
from spmdtrain.models.mixer_sizes import CHUNK, matrices, mixer_sizes
from spmdtrain.parallel.context.context_method import zigzag_order
from spmdtrain.train.islands.meeting_times import Timetable
from spmdtrain.train.sparsity.elements import largest_of_each

PAGES = Path(__file__).parents[1]
FILLS = (BLUE, GREEN, ORANGE, PURPLE)
QWEN_27B: dict[str, Any] = {
    "name": "llama",
    "embed": 5120,
    "heads": 24,
    "kv_heads": 4,
    "head_dim": 256,
    "output_gate": "channel",
    "mixers": ["delta", "attention"],
    "delta": {"key_heads": 16, "value_heads": 48, "key_dim": 128, "value_dim": 128, "taps": 4},
}


def chat_model() -> str:
    """The way of a chat model: from a published folder to a tuned one."""
    width, height = 190, 46
    stations = {
        "model/": (14, 14, "a published folder", GREY),
        "runs/chat_base": (304, 14, "a run at step 0", BLUE),
        "sums.jsonl": (14, 98, "your conversations", GREY),
        "sums.bin": (304, 98, "tokens, answers marked", BLUE),
        "runs/chat_tuned": (594, 56, "the best checkpoint", GREEN),
        "chat_model/": (594, 176, "a folder like the first", GREY),
    }
    picture = Drawing(800, 236)
    for name, (x, y, text, fill) in stations.items():
        picture.box(x, y, width, height, fill, round_by=5)
        picture.words(x + 10, y + 19, name, bold=True)
        picture.words(x + 10, y + 36, text, size=11)
    arrows = [
        ("import", (254, 30), (210, 37), (298, 37)),
        ("data prepare", (254, 114), (210, 121), (298, 121)),
        ("train", (545, 46), (500, 37), (588, 71)),
        ("", (0, 0), (500, 121), (588, 87)),
        ("eval, sample", (590, 144), (640, 108), (610, 130)),
        ("export", (718, 143), (689, 108), (689, 170)),
        ("transformers, or whatever loads it", (410, 203), (588, 199), (510, 199)),
    ]
    for text, place, start, end in arrows:
        picture.arrow(start, end)
        picture.words(*place, text, anchor="middle", size=11)
    return picture.svg()


def windows() -> str:
    """The same documents in windows, by each kind of `data.packing`."""
    sizes = [7, 4, 9, 3, 5, 8, 4, 6]
    length, step, tall, left = 12, 20, 26, 120
    starts = np.concatenate([[0], np.cumsum(np.array(sizes[:-1]) + 1)])
    fills = list(itertools.islice(itertools.cycle(FILLS), len(sizes)))
    stream = [number for number, size in enumerate(sizes) for _ in range(size)]
    packing = pack_documents(starts, Range(0, sum(sizes) + len(sizes)), length)
    best_fit = [
        [
            number
            for at in range(packing.bounds[window], packing.bounds[window + 1])
            for number in [int(np.searchsorted(starts, packing.starts[at], side="right")) - 1]
            for _ in range(packing.sizes[at])
        ]
        for window in range(packing.windows)
    ]
    cut = [stream[at : at + length] for at in range(0, len(stream) - length + 1, length)]
    rows = [("stream", cut, True), ("documents", cut, False), ("best_fit", best_fit, False)]
    gap = 14
    picture = Drawing(left + 4 * (length * step + gap) + 4, 216)
    for row, (name, filled, is_joined) in enumerate(rows):
        y = 16 + row * 68
        picture.words(left - 12, y + 18, name, anchor="end", bold=True)
        for window, numbers in enumerate(filled):
            x = left + window * (length * step + gap)
            picture.box(x, y, length * step, tall, "#f4f4f4", outline="#bbbbbb")
            at = 0
            for number, run in itertools.groupby(numbers):
                size = len(list(run))
                picture.box(x + at * step, y, size * step - 1, tall, fills[number])
                picture.words(
                    x + (at + size / 2) * step, y + 17, f"{number + 1}", anchor="middle", size=11
                )
                if not is_joined:
                    _bracket(picture, x + at * step + 2, x + (at + size) * step - 2, y + tall + 5)
                at += size
            if is_joined:
                _bracket(picture, x + 2, x + length * step - 2, y + tall + 5)
            if at < length:
                picture.words(
                    x + (at + length) * step / 2, y + 17, "padding", anchor="middle", size=10,
                    colour=FAINT,
                )  # fmt: skip
    picture.words(left, 208, "1 to 8: documents. A bracket: what attention sees.", colour=FAINT)
    return picture.svg()


def _bracket(picture: Drawing, start: float, stop: float, y: float) -> None:
    picture.line((start, y), (stop, y), width=2)
    for x in (start, stop):
        picture.line((x, y - 4), (x, y), width=2)


def learned() -> str:
    """A conversation as ChatML writes it, with the learned characters on green."""
    messages = [
        {"role": "system", "content": "Answer in one line."},
        {"role": "user", "content": "What is an axis?"},
        {"role": "assistant", "content": "A direction of a mesh."},
        {"role": "user", "content": "And a dim?"},
        {"role": "assistant", "content": "A direction of a tensor."},
    ]
    written = SimpleTemplate.parse(CHATML).write(
        of_messages(messages, "the picture"), ByteTokenizer(), "the picture"
    )
    text = "".join(written.parts)
    wide, tall, left = 8.4, 24, 14
    lines = text.splitlines(keepends=True)
    picture = Drawing(430, 16 + tall * len(lines) + 30)
    at = 0
    for row, line in enumerate(lines):
        y = 12 + row * tall
        shown = line.replace("\n", "⏎")
        marks = written.learned[at : at + len(line)]
        for column, is_learned in enumerate(marks):
            if is_learned:
                picture.box(left + column * wide, y, wide + 0.2, tall - 4, GREEN)
        for column, letter in enumerate(shown):
            picture.words(
                left + (column + 0.5) * wide, y + 15, letter, anchor="middle", mono=True,
                colour=INK if marks[column] else FAINT,
            )  # fmt: skip
        at += len(line)
    foot = 12 + len(lines) * tall
    picture.box(left, foot + 4, 14, 14, GREEN)
    picture.words(
        left + 20, foot + 15, "learned: what the model is to write, with the token that ends it"
    )
    return picture.svg()


def adapter() -> str:
    """A layer with an adapter, drawn to scale for width 64 and rank 8."""
    scale, width, rank = 2.2, 64, 8
    side, thin = width * scale, rank * scale
    picture = Drawing(640, 224)
    middle = 92
    picture.words(20, middle + 4, "x", bold=True, size=15)
    picture.arrow((36, middle), (150, middle))
    picture.box(160, middle - side / 2, side, side, GREY)
    picture.words(160 + side / 2, middle, "W", anchor="middle", bold=True, size=16)
    picture.words(160 + side / 2, middle + 18, "frozen", anchor="middle", size=11)
    picture.arrow((160 + side + 10, middle), (520, middle))
    picture.line((70, middle), (70, 196))
    low = 196
    picture.arrow((70, low), (150, low))
    picture.box(160, low - thin / 2, side, thin, GREEN)
    picture.words(160 + side / 2, low + 4, "A", anchor="middle", bold=True)
    picture.arrow((160 + side + 6, low), (338, low))
    picture.box(346, low - thin / 2, side, thin, GREEN)
    picture.words(346 + side / 2, low + 4, "B", anchor="middle", bold=True)
    picture.line((346 + side + 6, low), (532, low))
    picture.arrow((532, low), (532, middle + 14))
    picture.words(526, 150, "x alpha / rank", anchor="end", size=11)
    picture.words(532, middle + 6, "+", anchor="middle", bold=True, size=18)
    picture.arrow((546, middle), (600, middle))
    picture.words(606, middle + 4, "y", bold=True, size=15)
    share = 2 * rank / width
    picture.words(
        330, 30, f"width {width}, rank {rank}: trained are {share:.0%} of W's numbers,", size=11
    )
    picture.words(330, 46, "and only they have gradients and moments", size=11)
    return picture.svg()


def experts() -> str:
    """Two devices exchange their tokens: each has two of the four experts."""
    choices = [[0, 2, 3, 1], [2, 0, 2, 3]]  # the expert of each token, by device
    across, tall, left = 56, 30, 90
    picture = Drawing(640, 250)
    for device, chosen in enumerate(choices):
        x = left + device * 280
        picture.words(x + 2 * across - 6, 18, f"device {device}", anchor="middle", bold=True)
        for place, expert in enumerate(chosen):
            at = x + place * across
            picture.box(at, 30, across - 12, tall, FILLS[expert], round_by=4)
            end = left + (expert // 2) * 280 + (expert % 2) * 2 * across + across - 6
            picture.arrow(
                (at + across / 2 - 6, 34 + tall), (end, 146), colour=STRONG[FILLS[expert]]
            )
        for half in range(2):
            expert = 2 * device + half
            at = x + half * 2 * across
            picture.box(at, 150, 2 * across - 12, 44, FILLS[expert], round_by=4)
            picture.words(at + across - 6, 177, f"expert {expert}", anchor="middle", size=11)
    picture.words(left - 12, 50, "tokens", anchor="end", colour=FAINT)
    picture.words(left - 12, 108, "all-to-all", anchor="end", colour=FAINT)
    picture.words(left - 12, 177, "mlps", anchor="end", colour=FAINT)
    picture.words(
        left, 226, "A token has the colour of the expert that the router chose for it;", size=11
    )
    picture.words(left, 242, "afterwards it returns to its own device.", size=11)
    return picture.svg()


def ring() -> str:
    """Which device computes which scores: a sequence cut in order, and in zigzag order."""
    ways, cell = 4, 22
    chunks = 2 * ways
    picture = Drawing(680, 250)
    in_order = np.repeat(np.arange(ways), 2)
    zigzag = np.empty(chunks, int)
    zigzag[zigzag_order(chunks, ways)] = np.repeat(np.arange(ways), 2)
    for number, (title, device) in enumerate((("cut in order", in_order), ("zigzag", zigzag))):
        left, top = 70 + number * 320, 40
        picture.words(left, 22, title, bold=True)
        work = [0.0] * ways
        for query in range(chunks):
            fill = FILLS[device[query]]
            for key in range(query + 1):
                work[device[query]] += 0.5 if key == query else 1
                picture.box(
                    left + key * cell, top + query * cell, cell - 1, cell - 1, fill,
                    outline=STRONG[fill] if key == query else None,
                )  # fmt: skip
        for rank in range(ways):
            y = top + 16 + rank * 24
            picture.box(left + chunks * cell + 14, y - 10, 12, 12, FILLS[rank])
            picture.words(left + chunks * cell + 32, y, f"device {rank}: {work[rank]:g}", size=11)
        picture.words(left, top + chunks * cell + 16, "keys, chunk by chunk", size=11, colour=FAINT)
    picture.words(14, 36, "queries", size=11, colour=FAINT)
    return picture.svg()


def islands() -> str:
    """When four islands meet: in each step at first, then every few steps."""
    table = Timetable(after=6, interval=8, fragments=1, delay=0)
    steps, step, left, tall = 30, 20, 86, 26
    picture = Drawing(left + steps * step + 30, 200)
    for island in range(4):
        y = 24 + island * (tall + 8)
        picture.words(left - 10, y + 17, f"island {island}", anchor="end")
        for number in range(steps):
            fill = GREY if table.is_in_step(number + 1) else FILLS[island]
            picture.box(left + number * step, y, step - 2, tall, fill)
    for number in range(1, steps + 1):
        if table.meets(number):
            x = left + number * step - 1
            is_first = table.is_in_step(number)
            colour = FAINT if is_first else INK
            picture.line((x, 18), (x, 162), colour=colour, width=1 if is_first else 2.5)
    picture.words(left, 12, "in step", size=11, colour=FAINT)
    apart = left + table.after * step + 8
    picture.words(apart, 12, "apart: a meeting every 8 steps", size=11, colour=FAINT)
    picture.arrow((left, 176), (left + steps * step, 176))
    picture.words(left + steps * step, 192, "steps", anchor="end", size=11, colour=FAINT)
    return picture.svg()


def floats() -> str:
    """The bits of each format, with its largest number and its spacing at 1."""
    names = ["float32", "bfloat16", "float16", "float8_e5m2", "float8_e4m3fn"]
    bit, tall, left = 13, 22, 110
    picture = Drawing(left + 32 * bit + 250, 34 + len(names) * 34 + 26)
    picture.words(left + 32 * bit + 14, 20, "largest", size=11, colour=FAINT)
    picture.words(left + 32 * bit + 110, 20, "next after 1", size=11, colour=FAINT)
    for row, name in enumerate(names):
        info = jnp.finfo(getattr(jnp, name))
        y = 30 + row * 34
        picture.words(left - 10, y + 15, name, anchor="end", bold=True, size=11)
        kinds = [ORANGE] + [GREEN] * info.nexp + [BLUE] * info.nmant
        for at, fill in enumerate(kinds):
            picture.box(left + at * bit, y, bit - 1, tall, fill)
        picture.words(left + 32 * bit + 14, y + 15, f"{float(info.max):.3g}", size=11)
        picture.words(
            left + 32 * bit + 110, y + 15, f"1 + 1/{round(1 / float(info.eps)):,}", size=11
        )
    foot = 30 + len(names) * 34 + 14
    for at, (fill, text) in enumerate(((ORANGE, "sign"), (GREEN, "exponent"), (BLUE, "mantissa"))):
        picture.box(left + at * 100, foot - 10, 12, 12, fill)
        picture.words(left + at * 100 + 18, foot, text, size=11)
    return picture.svg()


def sparse() -> str:
    """A matrix before and after the choice of 2 of each 4 inputs."""
    rows, columns, cell, left, top = 8, 16, 20, 14, 34
    x = np.random.default_rng(0).normal(size=(rows, columns)).astype(np.float32)
    stays = np.asarray(largest_of_each(jnp.asarray(x), 2, 4, 1))
    picture = Drawing(2 * columns * cell + 3 * left + 20, top + rows * cell + 32)
    for number, (title, kept) in enumerate((("dense", np.ones_like(stays)), ("2:4", stays))):
        begin = left + number * (columns * cell + left + 20)
        picture.words(begin, 22, title, bold=True)
        for row, column in itertools.product(range(rows), range(columns)):
            shade = 235 - int(150 * min(abs(float(x[row, column])) / 2, 1))
            fill = f"#{shade:02x}{min(shade + 14, 255):02x}ff" if kept[row, column] else "#ffffff"
            picture.box(
                begin + column * cell + 1, top + row * cell + 1, cell - 2, cell - 2, fill,
                outline="#dddddd",
            )  # fmt: skip
        for column in range(4, columns, 4):
            at = begin + column * cell
            picture.line((at, top), (at, top + rows * cell), width=1)
        picture.words(
            begin,
            top + rows * cell + 20,
            "inputs of each output, in groups of 4",
            size=11,
            colour=FAINT,
        )
    return picture.svg()


def warmup() -> str:
    """Tokens of a step in the stages of the config on the page of warm-ups."""
    config = RunConfig(
        train={
            "steps": 20000,
            "global_batch": 512,
            "sequence_length": 4096,
            "stages": [
                {"until": 1000, "global_batch": 64, "sequence_length": 1024},
                {"tokens": 1_000_000_000, "global_batch": 128},
            ],
        }
    )
    stages = config.train.timetable
    shown, left, top, wide, tall = 5000, 90, 24, 520, 160
    picture = Drawing(left + wide + 30, top + tall + 44)
    most = stages[-1].tokens

    def place(step: float) -> float:
        return left + wide * min(step, shown) / shown

    for stage, fill in zip(stages, FILLS, strict=False):
        last = shown if stage.last is None else stage.last
        high = tall * stage.tokens / most
        picture.box(
            place(stage.first), top + tall - high, place(last) - place(stage.first), high, fill
        )
        middle = (place(stage.first) + place(last)) / 2
        text = f"{stage.global_batch} x {stage.sequence_length}"
        picture.words(middle, top + tall - high - 6, text, anchor="middle", size=11)
        picture.words(
            place(stage.first), top + tall + 16, f"{stage.first:,}", anchor="middle", size=11
        )
    picture.line((left, top + tall), (left + wide, top + tall))
    picture.words(left - 8, top + 12, "tokens", anchor="end", size=11, colour=FAINT)
    picture.words(left - 8, top + 26, "a step", anchor="end", size=11, colour=FAINT)
    picture.words(left + wide, top + tall + 34, "steps", anchor="end", size=11, colour=FAINT)
    return picture.svg()


def width() -> str:
    """The best rate of each width, with and without muP, from the table on the page."""
    text = (PAGES / "width.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (AdamW(?:, muP)?) \| (\d+) \|.*\| 2\^-([\d.]+) \|$", text, re.M)
    curves: dict[str, list[tuple[int, float]]] = {}
    for name, embed, exponent in rows:
        curves.setdefault(name, []).append((int(embed), -float(exponent)))
    left, top, wide, tall = 90, 30, 380, 170
    picture = Drawing(left + wide + 130, top + tall + 50)
    widths = [embed for embed, _ in curves["AdamW"]]

    def place(embed: int, exponent: float) -> tuple[float, float]:
        across = np.log2(embed / widths[0]) / np.log2(widths[-1] / widths[0])
        return left + 20 + across * (wide - 40), top + tall * (-exponent - 7) / 3.5

    for exponent in range(-10, -6):
        y = place(widths[0], exponent)[1]
        picture.line((left, y), (left + wide, y), colour="#dddddd", width=1)
        picture.words(left - 8, y + 4, f"2^{exponent}", anchor="end", size=11)
    for embed in widths:
        x, _ = place(embed, -7)
        picture.words(x, top + tall + 18, f"{embed}", anchor="middle", size=11)
    for (name, points), fill in zip(curves.items(), (ORANGE, BLUE), strict=True):
        line = [place(*point) for point in points]
        picture.curve(line, colour=STRONG[fill])
        picture.words(line[-1][0] + 12, line[-1][1] + 4, name, colour=STRONG[fill], bold=True)
    picture.words(left, 16, "best learning rate", size=11, colour=FAINT)
    picture.words(
        left + wide / 2,
        top + tall + 38,
        "width of the model",
        anchor="middle",
        size=11,
        colour=FAINT,
    )
    return picture.svg()


def linear_time() -> str:
    """What attention and the gated delta rule of Qwen3.5-27B cost over the length, by formula."""
    lengths = [2**power for power in range(10, 19)]
    cost, cache = mixer_costs(QWEN_27B, lengths)
    left, top, wide, tall, apart = 56, 46, 250, 170, 90
    picture = Drawing(2 * (left + wide) + apart - 20, top + tall + 50)
    for number, (title, curves, ticks) in enumerate(
        (
            ("million FLOPs of a token, forward", cost, (100, 1000)),
            ("MiB that a sequence keeps", cache, (1, 10, 100, 1000)),
        )
    ):
        start = left + number * (wide + apart)
        low, high = np.log10(ticks[0]), np.log10(max(curves["attention"])) + 0.1

        def place(length: int, value: float, start=start, low=low, high=high):
            across = (np.log2(length) - 10) / 8
            return start + wide * across, top + tall * (high - np.log10(value)) / (high - low)

        picture.words(start, 20, title, size=11, colour=FAINT)
        for tick in ticks:
            _, y = place(1024, tick)
            picture.line((start, y), (start + wide, y), colour="#dddddd", width=1)
            picture.words(start - 8, y + 4, f"{tick:,}", anchor="end", size=11)
        for length in lengths[::2]:
            x, _ = place(length, 1)
            picture.words(x, top + tall + 18, f"{length // 1024}k", anchor="middle", size=11)
        for (name, values), fill in zip(curves.items(), (ORANGE, BLUE), strict=True):
            line = [place(*point) for point in zip(lengths, values, strict=True)]
            picture.curve(line, colour=STRONG[fill])
            x, y = line[6]
            picture.words(x - 12, y - 10, name, anchor="end", colour=STRONG[fill], bold=True)
        middle = start + wide / 2
        words = "tokens of a sequence"
        picture.words(middle, top + tall + 38, words, anchor="middle", size=11, colour=FAINT)
    return picture.svg()


def mixer_costs(
    sizes: dict[str, Any], lengths: Sequence[int]
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Returns (million forward FLOPs of a token, MiB of the cache) of each mixer, by length.

    Tokens attend to half of their sequence on average, and a cache is in 16 bits but for states.
    """
    model = RunConfig.model_validate({"model": sizes}).model
    delta = mixer_sizes(model, "delta")
    assert delta is not None
    queries, keys = model.heads * model.head_dim, 2 * model.kv_heads * model.head_dim
    projected = 2 * model.embed * (3 * queries + keys)  # with the gates and the way back
    flops = {
        "attention": [(projected + 2 * queries * length) / 1e6 for length in lengths],
        "delta": [(2 * matrices(delta, model.embed) + delta.flops(CHUNK)) / 1e6] * len(lengths),
    }
    cache = {
        "attention": [2 * keys * length / 2**20 for length in lengths],
        "delta": [delta.state_bytes / 2**20] * len(lengths),
    }
    return flops, cache


def report() -> str:
    """A loss of 6,000 steps with two spikes, as the page of a run draws it."""
    steps, left, top, wide, tall = 6000, 56, 30, 560, 170
    random = np.random.default_rng(0)
    at = np.arange(1.0, steps + 1)
    loss = 1.6 + 4 * at**-0.3 + 0.12 * random.standard_normal(steps)
    loss[[2199, 4399]] += 1.3
    x, _, low, high = thinned(at, loss, 140)
    line, mean, _, _ = thinned(at, smoothed(loss, 100), 140)
    assert low is not None and high is not None
    picture = Drawing(left + wide + 30, top + tall + 66)

    def place(xs: np.ndarray, ys: np.ndarray) -> list[tuple[float, float]]:
        across = left + wide * xs / steps
        down = top + tall * (4.2 - np.minimum(ys, 4.2)) / 3
        return list(zip(across.tolist(), down.tolist(), strict=True))

    for value in (1.5, 2.5, 3.5):
        ((_, y),) = place(np.zeros(1), np.array([value]))
        picture.line((left, y), (left + wide, y), colour="#dddddd", width=1)
        picture.words(left - 8, y + 4, f"{value}", anchor="end", size=11)
    band = place(x, high) + place(x, low)[::-1]
    picture.outline(band, colour=BLUE, fill=True)
    picture.outline(place(line, mean), colour=STRONG[BLUE])
    for step in range(0, steps + 1, 2000):
        x = left + wide * step / steps
        picture.words(x, top + tall + 18, f"{step:,}", anchor="middle", size=11)
    picture.words(left, 16, "loss", size=11, colour=FAINT)
    foot = top + tall + 46
    picture.box(left, foot - 10, 14, 14, BLUE)
    picture.words(left + 20, foot + 1, "every step, from minimum to maximum", size=11)
    picture.line((left + 260, foot - 3), (left + 282, foot - 3), colour=STRONG[BLUE], width=2)
    picture.words(left + 290, foot + 1, "mean of the steps around", size=11)
    return picture.svg()


def kept() -> str:
    """Which checkpoints of a run stay on disk, by the settings of [checkpoint]."""
    saved = list(range(100, 1300, 100))
    losses = [3.1, 2.8, 2.6, 2.45, 2.4, 2.31, 2.35, 2.38, 2.34, 2.36, 2.41, 2.43]
    choices = [
        ("keep = 3", {"keep": 3}),
        ('keep = "best"', {"keep": "best"}),
        ("keep = 1, keep_best = 2", {"keep": 1, "keep_best": 2}),
        ("keep = 1, keep_every = 500", {"keep": 1, "keep_every": 500}),
    ]
    left, step, tall = 210, 44, 26
    picture = Drawing(left + len(saved) * step + 14, 40 + 34 * len(choices) + 66)
    for at, number in enumerate(saved):
        picture.words(
            left + (at + 0.5) * step, 22, f"{number}", anchor="middle", size=11, colour=FAINT
        )
    for row, (text, settings) in enumerate(choices):
        retention = Retention(CheckpointConfig(**settings))
        for number, loss in zip(saved, losses, strict=True):
            retention.evaluated(number, {"eval_loss": loss})
        stay = retention.stay(saved)
        y = 32 + row * 34
        picture.words(left - 12, y + 17, text, anchor="end", size=11)
        for at, number in enumerate(saved):
            fill = GREEN if number in stay else "#f4f4f4"
            picture.box(left + at * step + 3, y, step - 6, tall, fill, round_by=3)
    y = 32 + 34 * len(choices) + 4
    picture.words(left - 12, y + 30, "eval_loss", anchor="end", size=11, colour=FAINT)
    points = [
        (left + (at + 0.5) * step, y + 52 * (3.1 - loss) / 0.8) for at, loss in enumerate(losses)
    ]
    picture.curve(points, colour=STRONG[BLUE])
    return picture.svg()


FIGURES: dict[str, Callable[[], str]] = {
    "adapter.svg": adapter,
    "chat_model.svg": chat_model,
    "checkpoints.svg": kept,
    "experts.svg": experts,
    "floats.svg": floats,
    "islands.svg": islands,
    "learned.svg": learned,
    "linear_time.svg": linear_time,
    "report.svg": report,
    "ring.svg": ring,
    "sparse.svg": sparse,
    "warmup.svg": warmup,
    "width.svg": width,
    "windows.svg": windows,
}
