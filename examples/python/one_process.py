"""A training in one process. many_processes.py is the same on many: python one_process.py"""

import torch
from torch.utils.data import DataLoader, TensorDataset

points = torch.linspace(-1, 1, 256).reshape(-1, 1)
dataset = TensorDataset(points, 2 * points + 1)
loader = DataLoader(dataset, batch_size=64, shuffle=True)
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
for epoch in range(20):
    for x, y in loader:
        loss = torch.nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    torch.save(model.state_dict(), "model.pt")
