"""etcd, the API server (RBAC, admission, audit log), the controllers, the scheduler and DNS: their command lines.

The node grace period is 50 s, Kubernetes' default. A shorter one loses nodes sooner, but also loses all of them when
the API server restarts, since informers that were refused sleep for up to a minute.
"""

from __future__ import annotations

from tests.e2e.cluster.layout import CONTROL_PLANE_IP, SERVICE_CIDR, Layout

NODE_GRACE = "50s"
ETCD = "http://127.0.0.1:2379"
READY_URL = f"http://{CONTROL_PLANE_IP}:8181/ready"  # CoreDNS's


def prepare(layout: Layout) -> None:
    """Writes the files that the command lines name."""
    layout.render("Corefile", layout.root / "Corefile")
    layout.render("dns.yaml", layout.root / "dns.yaml")
    layout.render("audit-policy.yaml", layout.root / "audit-policy.yaml")


def set_grace(layout: Layout, grace: str) -> None:
    """For the controller manager's next start."""
    (layout.root / "grace").write_text(grace)


def commands(layout: Layout) -> dict[str, list[str]]:
    root, pki = layout.root, layout.root / "pki"
    note = root / "grace"
    grace = note.read_text() if note.exists() else NODE_GRACE

    def controller(name: str) -> list[str]:
        kubeconfig = root / "kubeconfig" / name
        own = [f"--{kind}kubeconfig={kubeconfig}" for kind in ("", "authentication-", "authorization-")]
        return [name, "--leader-elect=false", f"--cert-dir={root}/certs/{name}", *own]

    return {
        "etcd": [
            "etcd",
            f"--data-dir={root}/etcd",
            "--unsafe-no-fsync",
            "--listen-peer-urls=http://127.0.0.1:2380",
            f"--listen-client-urls={ETCD}",
            f"--advertise-client-urls={ETCD}",
        ],
        "kube-apiserver": [
            "kube-apiserver",
            f"--etcd-servers={ETCD}",
            f"--advertise-address={CONTROL_PLANE_IP}",
            f"--service-cluster-ip-range={SERVICE_CIDR}",
            "--authorization-mode=Node,RBAC",
            "--enable-admission-plugins=NodeRestriction,OwnerReferencesPermissionEnforcement",
            f"--cert-dir={root}/certs/kube-apiserver",
            f"--client-ca-file={pki}/ca.pem",
            f"--tls-cert-file={pki}/server.pem",
            f"--tls-private-key-file={pki}/server.pem",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={pki}/tokens.pem",
            f"--service-account-signing-key-file={pki}/tokens.pem",
            f"--kubelet-client-certificate={pki}/admin.pem",
            f"--kubelet-client-key={pki}/admin.pem",
            f"--kubelet-certificate-authority={pki}/ca.pem",
            "--kubelet-preferred-address-types=InternalIP",  # or logs and exec look the node's name up
            f"--requestheader-client-ca-file={pki}/ca.pem",
            "--requestheader-allowed-names=front-proxy",
            "--requestheader-username-headers=X-Remote-User",
            "--requestheader-group-headers=X-Remote-Group",
            "--requestheader-extra-headers-prefix=X-Remote-Extra-",
            f"--proxy-client-cert-file={pki}/front-proxy.pem",
            f"--proxy-client-key-file={pki}/front-proxy.pem",
            f"--audit-policy-file={root}/audit-policy.yaml",
            f"--audit-log-path={layout.audit_log}",
            "--audit-log-maxsize=10000",  # MB; one file, so that a test reads the whole run
        ],
        "kube-controller-manager": [
            *controller("kube-controller-manager"),
            "--node-monitor-period=1s",
            f"--node-monitor-grace-period={grace}",
            "--use-service-account-credentials",
            f"--service-account-private-key-file={pki}/tokens.pem",
            f"--root-ca-file={pki}/ca.pem",
            f"--cluster-signing-cert-file={pki}/ca.pem",
            f"--cluster-signing-key-file={pki}/ca.key",
        ],
        "kube-scheduler": controller("kube-scheduler"),
        "coredns": ["coredns", "-conf", f"{root}/Corefile"],
    }
