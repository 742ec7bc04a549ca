"""From a look at the user's own images and network to a params.yaml that fits them."""
