"""The CNN under shared noise: CentralDP inside a secure sum."""
