"""The privacy card of a run: its guarantee and all charges, as JSON and as a page."""

from .card import Answers, CardRelease, PrivacyCard
from .described import Described, settings_of
from .heads import CardHead

__all__ = ["Answers", "CardHead", "CardRelease", "Described", "PrivacyCard", "settings_of"]
