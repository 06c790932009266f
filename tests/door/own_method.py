"""FedDyn as somebody outside fedspan would write it. Acar et al., ICLR 2021, Algorithm 1."""

from dataclasses import dataclass

import torch

from fedspan import About, Down, Sent, Training, fields, tree


@dataclass(frozen=True, kw_only=True)
class FedDyn(Training):
    """FedDyn. Symbols: theta = θ, g = ∇L_k(θ_k), h = h, m = the number of clients. Kept: g. Sent: theta."""

    about = About(reference="Acar et al., ICLR 2021", weight="one")
    alpha: fields.Positive = 0.1
    """How strongly a client's objective is bent towards the common one."""

    def init_server(self, task, federation):
        return {"theta": task.init(), "h": tree.zeros_like(task.init()), "m": torch.tensor(float(federation.clients))}

    def init_client(self, task, who):
        return {"g": tree.zeros_like(task.init())}

    def download(self, server, ids, capacity, round):
        return Down(shared={"theta": server["theta"]})

    def client_update(self, task, client, down, visit):
        start, g, a = down["theta"], client["g"], self.alpha
        near = lambda theta: a / 2 * tree.squared_norm(tree.sub(theta, start)) - tree.dot(g, theta)
        theta = self.fit(lambda theta, batch: task.loss(theta, batch) + near(theta), start, visit["train"])
        g = tree.add(g, tree.sub(theta, start), -a)  # ∇L_k(θ_k) = ∇L_k(θ_k) − α (θ_k − θ)
        return {"g": g}, Sent(weight=torch.ones_like(visit.examples), mean={"theta": theta})

    def server_update(self, server, round):
        mean, share = round.mean["theta"], len(round.ids) / server["m"]
        h = tree.add(server["h"], tree.sub(mean, server["theta"]), -self.alpha * share)
        return {**server, "theta": tree.add(mean, h, -1 / self.alpha), "h": h}

    def personal(self, task, client, down, visit):
        return down["theta"]
