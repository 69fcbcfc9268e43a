"""What is asked of a cloud's provider directly: regions, images, types and prices.

Each class takes the clients that it asks with, so none of them knows where keys come from.
"""
