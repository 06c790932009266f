"""Data: sources of examples, and partitions that divide them among clients."""

from fedspan.data.describe import describe, figure, heterogeneity, label_counts, text_picture
from fedspan.data.federated import FederatedData
from fedspan.data.partitions.divide import PARTITIONS, check_partition, partition
from fedspan.data.sources.catalog import SOURCES
from fedspan.data.sources.load import Source, load

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
