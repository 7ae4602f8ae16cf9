"""How answers are added up: in the open, or by a secure sum that opens only the sum."""
