"""A client's steps of gradient descent: alone, with other clients', with gradients written out."""
