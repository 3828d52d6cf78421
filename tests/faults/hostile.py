"""Run directories that somebody has made to lead out of themselves, to run code, or to fill the
memory.
"""

import base64
import hashlib
import json
import pickle
import shutil
from pathlib import Path

import numpy as np
import tensorstore as ts

from spmdtrain.checkpoints.leaves.fingerprint import fingerprint

LEAF = "tokens.table_ve"  # [64, 16] in the tests' runs


class Case:
    """A copy of the run, and a folder outside of it that holds a secret."""

    def __init__(self, folder: Path):
        self.run = folder / "run"
        self.outside = folder / "outside"
        self.outside.mkdir(parents=True)
        self.params = self.run / "checkpoints" / "1" / "params"
        self.weights = np.arange(64 * 16, dtype=np.float32).reshape(64, 16)
        spec = {"driver": "zarr", "kvstore": f"file://{self.outside}/x/"}
        array = ts.open(spec, create=True, dtype=ts.float32, shape=self.weights.shape).result()
        array.write(self.weights).result()
        (self.outside / "file").write_text("untouched")

    def change_meta(self, change) -> None:
        """With a digest that is right: whoever changes one can change the other."""
        path = self.run / "checkpoints" / "1" / "meta" / "metadata"
        meta = json.loads(path.read_text())
        meta.pop("digest")
        change(meta)
        meta["digest"] = hashlib.sha256(json.dumps(meta, sort_keys=True).encode()).hexdigest()
        path.write_text(json.dumps(meta))

    def change_tree(self, change) -> None:
        path = self.params / "_METADATA"
        tree = json.loads(path.read_text())
        change(tree)
        path.write_text(json.dumps(tree))

    def files(self) -> dict[str, bytes]:
        return {
            str(path): path.read_bytes()
            for path in sorted(self.outside.rglob("*"))
            if path.is_file()
        }

    def database(self) -> ts.KvStore:
        return ts.KvStore.open({"driver": "ocdbt", "base": f"file://{self.params}/"}).result()


def named(case: Case, name: str, in_database: bool = False) -> None:
    """A leaf whose name is a path, which Orbax would join to the folder where no database is
    used.
    """

    def meta(found):
        found["leaves"][name] = [[64, 16], "float32"]
        own = found["fingerprints"].pop(LEAF)
        found["fingerprints"][name] = own if in_database else list(fingerprint(case.weights))
        found["leaves"].pop(LEAF)

    def tree(found):
        [key] = [key for key in found["tree_metadata"] if LEAF in key]
        leaf = found["tree_metadata"].pop(key)
        found["tree_metadata"] = {
            f"('{name}',)": leaf | {"key_metadata": [{"key": name, "key_type": 2}]}
        }
        found["use_ocdbt"] = in_database

    case.change_meta(meta)
    case.change_tree(tree)
    shardings = json.loads((case.params / "_sharding").read_text())
    shardings[base64.b64encode(name.encode()).decode()] = shardings.pop(
        base64.b64encode(LEAF.encode()).decode()
    )
    (case.params / "_sharding").write_text(json.dumps(shardings))


def parent_name(case: Case) -> None:
    named(case, "../../../../outside/x")


def name_in_database(case: Case) -> None:
    """One that is not a path as long as nobody writes a file by it, as an export may."""
    name = "../../outside/y"
    database = case.database()
    for key in database.list().result():
        if key.startswith(LEAF.encode()):
            database.write(
                name.encode() + key[len(LEAF) :], database.read(key).result().value
            ).result()
    named(case, name, in_database=True)


def absolute_name(case: Case) -> None:
    named(case, str(case.outside / "x"))


def linked_file(case: Case) -> None:
    target = next(path for path in sorted(case.params.rglob("d/*")) if path.is_file())
    moved = case.outside / target.name
    shutil.move(target, moved)
    target.symlink_to(moved)


def linked_step(case: Case) -> None:
    step = case.params.parent
    shutil.move(step, case.outside / "step")
    step.symlink_to(case.outside / "step")


def claimed(case: Case, elements: int = 2**60) -> None:
    """The meta and the array both say so many elements."""
    shape = [elements // 16, 16]
    case.change_meta(lambda meta: meta["leaves"].update({LEAF: [shape, "float32"]}))
    database = case.database()
    zarray = json.loads(database.read(f"{LEAF}/.zarray").result().value)
    database.write(
        f"{LEAF}/.zarray", json.dumps(zarray | {"shape": shape, "fill_value": 0}).encode()
    ).result()


def claimed_some(case: Case) -> None:
    """They say half a GiB, which would fit."""
    claimed(case, 2**27)


def claimed_chunks(case: Case) -> None:
    """The array is small, and its one chunk is not."""
    database = case.database()
    zarray = json.loads(database.read(f"{LEAF}/.zarray").result().value)
    changed = zarray | {"chunks": [2**30, 16], "fill_value": 0}
    database.write(f"{LEAF}/.zarray", json.dumps(changed).encode()).result()


def crc32c(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def other_base(case: Case) -> None:
    """A database whose manifest says that its files lie in ../../../../outside."""
    there, lead = "aa/aa/aa/aa/outside/d_", "../../../../outside/d_"
    pairs = [
        (key, case.database().read(key).result().value) for key in case.database().list().result()
    ]
    shutil.rmtree(case.params / "ocdbt.process_0")
    shutil.rmtree(case.params / "d")
    (case.params / "manifest.ocdbt").unlink()
    spec = {
        "driver": "ocdbt",
        "base": f"file://{case.params}/",
        "config": {"compression": None, "max_inline_value_bytes": 0},
        **{f"{kind}_data_prefix": there for kind in ("value", "btree_node", "version_tree_node")},
    }
    database = ts.KvStore.open(spec).result()
    for key, value in pairs:
        database.write(key, value).result()
    for path in (case.params / "aa/aa/aa/aa/outside").iterdir():
        shutil.move(path, case.outside / path.name)
    for path in [case.params / "manifest.ocdbt", *case.outside.glob("d_*")]:
        content = path.read_bytes().replace(there[:11].encode(), lead[:11].encode())
        if path.name.startswith("manifest"):
            assert lead[:11].encode() in content
            content = content[:-4] + crc32c(content[:-4]).to_bytes(4, "little")
        path.write_bytes(content)


class Payload:
    """Leaves a file where it is unpickled."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return (Path.touch, (self.path,))


def pickled(case: Case) -> None:
    """Every file is a pickle that runs code when it is read as one."""
    payload = pickle.dumps(Payload(case.outside / "ran"))
    for path in case.params.parent.rglob("*"):
        if path.is_file():
            path.write_bytes(payload)


def own_handlers(case: Case) -> None:
    """The handler and the type of a leaf are named as functions."""
    path = case.params.parent / "_CHECKPOINT_METADATA"
    found = json.loads(path.read_text())
    path.write_text(
        json.dumps(found | {"item_handlers": dict.fromkeys(found["item_handlers"], "os.system")})
    )

    def change(tree):
        for leaf in tree["tree_metadata"].values():
            leaf["value_metadata"]["value_type"] = "subprocess.run"

    case.change_tree(change)


NAMES = [parent_name, absolute_name, name_in_database]
LINKS = [linked_file, linked_step]
ATTACKS = [*NAMES, *LINKS, claimed, claimed_some, claimed_chunks, other_base, pickled, own_handlers]
