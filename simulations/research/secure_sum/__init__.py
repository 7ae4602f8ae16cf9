"""The attack on single uploads, and on sums of more and more of them."""
