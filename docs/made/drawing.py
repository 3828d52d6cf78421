"""A picture as SVG: rectangles, lines, arrows and words on a white ground.

The ground is part of the picture, so that its dark words can be read on a dark page as well.
"""

from xml.sax.saxutils import escape

FONT = "Helvetica, Arial, sans-serif"
INK = "#333333"
FAINT = "#777777"
GREY = "#e4e4e4"
BLUE = "#cfdff2"
GREEN = "#cfe8d3"
ORANGE = "#f7dcc0"
PURPLE = "#e3d6ee"
STRONG = {GREY: "#9a9a9a", BLUE: "#306da6", GREEN: "#30a651", ORANGE: "#c8741b", PURPLE: "#7d4fa3"}


class Drawing:
    """A picture of a fixed size, to which shapes are added from back to front."""

    def __init__(self, width: int, height: int):
        self._parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'width="{width}" height="{height}" font-family="{FONT}" font-size="12" fill="{INK}">',
            f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        ]

    def box(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        fill: str = GREY,
        *,
        outline: str | None = None,
        round_by: int = 0,
    ) -> None:
        """Draws a rectangle by its upper left corner."""
        border = f' stroke="{outline}"' if outline else ""
        corner = f' rx="{round_by}"' if round_by else ""
        self._parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"{corner} '
            f'fill="{fill}"{border}/>'
        )

    def words(
        self,
        x: float,
        y: float,
        text: str,
        *,
        anchor: str = "start",
        size: int = 12,
        colour: str = INK,
        bold: bool = False,
        mono: bool = False,
    ) -> None:
        """Writes a line whose baseline is at y; `anchor` is start, middle or end."""
        style = ' font-weight="bold"' if bold else ""
        style += ' font-family="monospace"' if mono else ""
        self._parts.append(
            f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" font-size="{size}" '
            f'fill="{colour}"{style}>{escape(text)}</text>'
        )

    def line(
        self,
        start: tuple[float, float],
        end: tuple[float, float],
        *,
        colour: str = FAINT,
        dashed: bool = False,
        width: float = 1.5,
    ) -> None:
        """Draws a straight line."""
        dashes = ' stroke-dasharray="4 3"' if dashed else ""
        self._parts.append(
            f'<line x1="{start[0]:g}" y1="{start[1]:g}" x2="{end[0]:g}" y2="{end[1]:g}" '
            f'stroke="{colour}" stroke-width="{width:g}"{dashes}/>'
        )

    def arrow(
        self, start: tuple[float, float], end: tuple[float, float], *, colour: str = FAINT
    ) -> None:
        """Draws a straight arrow, whose head is at `end`; it runs across or down."""
        self.line(start, end, colour=colour)
        x, y = end
        dx, dy = end[0] - start[0], end[1] - start[1]
        length = (dx**2 + dy**2) ** 0.5
        along, across = (dx / length, dy / length), (-dy / length, dx / length)
        wings = [
            (x - 7 * along[0] + side * across[0], y - 7 * along[1] + side * across[1])
            for side in (4, -4)
        ]
        points = " ".join(f"{a:.1f},{b:.1f}" for a, b in [wings[0], (x, y), wings[1]])
        self._parts.append(f'<polygon points="{points}" fill="{colour}"/>')

    def curve(self, points: list[tuple[float, float]], *, colour: str) -> None:
        """Draws straight lines from point to point, and a dot at each."""
        self.outline(points, colour=colour)
        self._parts += [
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in points
        ]

    def outline(
        self, points: list[tuple[float, float]], *, colour: str, fill: bool = False
    ) -> None:
        """Draws straight lines from point to point; with `fill`, the area inside them."""
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        if fill:
            self._parts.append(f'<polygon points="{line}" fill="{colour}"/>')
        else:
            self._parts.append(
                f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>'
            )

    def svg(self) -> str:
        """Returns the text of the picture."""
        return "\n".join([*self._parts, "</svg>"]) + "\n"
