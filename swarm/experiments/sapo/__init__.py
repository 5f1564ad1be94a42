"""The sharing experiment of SAPO, with the control that the paper lacks."""
