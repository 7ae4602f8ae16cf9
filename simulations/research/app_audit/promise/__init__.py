"""The third part of an audit: what an app's promise of privacy is worth."""
