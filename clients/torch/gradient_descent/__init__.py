"""A client's steps of gradient descent: by autograd, or with the gradients written out."""
