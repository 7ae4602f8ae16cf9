"""The commands of research, a module for each."""
