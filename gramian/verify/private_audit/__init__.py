"""`gramian audit`: checks of a private run on the user's machine, and the signed receipt."""
