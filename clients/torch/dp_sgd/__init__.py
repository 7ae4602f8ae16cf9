"""DP-SGD around the user's own training loop: model, optimiser and loader of private steps."""
