"""Every format of matrices that a family may be published in can be opened."""

from spmdtrain.config.published.families.all_families import FAMILIES
from spmdtrain.config.published.quantisation import SCALED
from spmdtrain.interop.packings import UNPACKINGS


def test_the_packing_of_every_family_is_known():
    of_families = {family.packing for family in FAMILIES.values()}
    assert of_families | {SCALED} == set(UNPACKINGS)
