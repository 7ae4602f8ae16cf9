"""The privacy card of a run: its guarantee and all charges, as JSON and as a page."""

from .card import Answers, CardRelease, PrivacyCard
from .described import Described, settings_of

__all__ = ["Answers", "CardRelease", "Described", "PrivacyCard", "settings_of"]
