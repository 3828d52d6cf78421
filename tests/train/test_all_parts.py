"""The list of the features of a step says what their parts say."""

import pytest

from spmdtrain.train import all_parts


@pytest.mark.parametrize("feature", all_parts.FEATURES, ids=lambda feature: feature.part.__name__)
def test_a_feature_is_listed_with_the_names_of_its_items(feature):
    """The list is read without importing the parts, and a checkpoint has an entry for each name."""
    assert tuple(item.name for item in feature.part().items) == feature.items
