"""Keys to the clouds: found where users have them, and put into the form that IM takes."""
