"""Convert whole models: every convolution and attention becomes its ConvNN twin, without losing a digit."""

from convnn.surgery import attention, maps
from convnn.surgery.operate import convert, revert
from convnn.surgery.report import Entry, Report
from convnn.surgery.rules import exact, leave
from convnn.surgery.twins import Refused, Twin, register, unregister

__all__ = [
    "Entry",
    "Refused",
    "Report",
    "Twin",
    "attention",
    "convert",
    "exact",
    "leave",
    "maps",
    "register",
    "revert",
    "unregister",
]
