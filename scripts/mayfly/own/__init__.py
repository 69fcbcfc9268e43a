"""Machines of the user's own: an inventory in place of a cloud, ansible-playbook in place of IM."""
