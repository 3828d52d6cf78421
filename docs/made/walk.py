"""Draws the walk of one batch through the code for the page "How it works"."""

from xml.sax.saxutils import escape

# (what happens, the file that does it, what leaves it)
PICTURE = "walk.svg"
STATIONS = [
    ("read the settings", "spmdtrain/config/load.py", "RunConfig"),
    ("mesh, rules, abstract state", "spmdtrain/train/shard.py", "Setup"),
    ("create or restore the state", "spmdtrain/checkpoints/checkpoints.py", "TrainState"),
    ("sample indices to windows", "spmdtrain/data/batches.py", "rows on the host"),
    ("rows to global arrays", "spmdtrain/train/batch.py", "tokens [a, b, t]"),
    ("the step begins", "spmdtrain/train/step.py", "params, batch"),
    ("scan over microbatches", "spmdtrain/train/gradients/grad_accumulation.py", "tokens [b, t]"),
    ("embed, blocks, head", "spmdtrain/models/transformer.py", "hidden [b, t, e], table [v, e]"),
    ("cross entropy", "pallas_kernels/loss/api.py", "sum of losses"),
    ("reduce over the mesh", "spmdtrain/parallel/reduce.py", "mean gradients"),
    ("clip and update", "spmdtrain/train/updates/optimizers.py", "new TrainState"),
    ("figures, saves, signals", "spmdtrain/running/loop.py", "metrics.jsonl"),
]
COLUMNS = 3
BOX_WIDTH = 272
BOX_HEIGHT = 56
ACROSS = BOX_WIDTH + 54
DOWN = BOX_HEIGHT + 44
MARGIN = 14
SETUP = 3  # the first stations happen once in a run
REGION = range(6, 10)  # and these inside the manual region of the step


def picture() -> str:
    """The stations as boxes in reading order, with what each hands to the next below it."""
    rows = -(-len(STATIONS) // COLUMNS)
    width = MARGIN + ACROSS * COLUMNS
    height = MARGIN + DOWN * rows
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" font-family="Helvetica, Arial, sans-serif" font-size="12" '
        'fill="#333333">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
    ]
    for number, (action, file, leaves) in enumerate(STATIONS):
        left = MARGIN + ACROSS * (number % COLUMNS)
        top = MARGIN + DOWN * (number // COLUMNS)
        fill = "#e4e4e4" if number < SETUP else "#cfe8d3" if number in REGION else "#cfdff2"
        parts += [
            f'<rect x="{left}" y="{top}" width="{BOX_WIDTH}" height="{BOX_HEIGHT}" rx="5" '
            f'fill="{fill}"/>',
            f'<text x="{left + 10}" y="{top + 22}" font-weight="bold">'
            f"{number + 1}. {escape(action)}</text>",
            f'<text x="{left + 10}" y="{top + 42}" font-size="11">{escape(file)}</text>',
            f'<text x="{left + 10}" y="{top + BOX_HEIGHT + 16}" font-size="11" fill="#777777">'
            f"gives {escape(leaves)}</text>",
        ]
        if number % COLUMNS < COLUMNS - 1 and number < len(STATIONS) - 1:
            x = left + BOX_WIDTH + 6
            y = top + BOX_HEIGHT // 2
            parts.append(
                f'<path d="M{x} {y} h34 m-8 -5 l8 5 l-8 5" fill="none" '
                'stroke="#777777" stroke-width="1.5"/>'
            )
    return "\n".join([*parts, "</svg>"]) + "\n"
