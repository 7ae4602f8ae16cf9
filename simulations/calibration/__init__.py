"""The noise of schemes for a budget, and what it truly gives."""
