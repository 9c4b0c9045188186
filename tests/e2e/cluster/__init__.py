"""A real Kubernetes cluster, built from source, for the end-to-end tests: no registry, no Docker, no way out.

    python -m tests.e2e.cluster up [--nodes N]     # prints the kubeconfig
    python -m tests.e2e.cluster down               # leaves nothing, also after a killed run

Every part is the real one: etcd, kube-apiserver with RBAC and admission, controller-manager, scheduler, kubelet,
kube-proxy, CoreDNS, containerd and runc. Nodes are network namespaces, so one can be partitioned or killed for real.
"""
