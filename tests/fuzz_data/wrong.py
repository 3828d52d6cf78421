"""The error of a promise that does not hold."""


class Wrong(Exception):
    """Something that must hold does not; those of one `kind` are one fault."""

    def __init__(self, kind: str, detail: str = ""):
        self.kind = kind
        super().__init__(f"{kind}: {detail}" if detail else kind)
