"""Data: sources of examples, and partitions that divide them among clients."""

from fedspan.data.catalog import SOURCES
from fedspan.data.federated import FederatedData
from fedspan.data.partition import PARTITIONS, check_partition, partition
from fedspan.data.picture import describe, figure, heterogeneity, label_counts, text_picture
from fedspan.data.sources import Source, load

__all__ = [
    "PARTITIONS",
    "SOURCES",
    "FederatedData",
    "Source",
    "check_partition",
    "describe",
    "figure",
    "heterogeneity",
    "label_counts",
    "load",
    "partition",
    "text_picture",
]
