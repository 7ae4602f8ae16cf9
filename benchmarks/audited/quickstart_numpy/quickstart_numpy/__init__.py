"""An app of the size of a quickstart of Flower."""
