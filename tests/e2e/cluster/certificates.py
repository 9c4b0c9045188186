"""One authority for the cluster, and for each user a certificate and a kubeconfig."""

from __future__ import annotations

import datetime
import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from tests.e2e.cluster.layout import API_IP, CONTROL_PLANE_IP, Layout, node_ip

LIFETIME = datetime.timedelta(days=30)
COMPONENTS = ("kube-controller-manager", "kube-scheduler", "kube-proxy")
API_NAMES = (
    *(CONTROL_PLANE_IP, API_IP, "127.0.0.1", "localhost", "kubernetes", "kubernetes.default"),
    *("kubernetes.default.svc", "kubernetes.default.svc.cluster.local"),
)


@dataclass(frozen=True, slots=True)
class Authority:
    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey

    @classmethod
    def new(cls, name: str) -> Authority:
        key = ec.generate_private_key(ec.SECP256R1())
        subject = _name(name, None)
        usage = x509.KeyUsage(
            digital_signature=True,
            key_cert_sign=True,
            crl_sign=True,
            content_commitment=False,
            key_encipherment=False,
            data_encipherment=False,
            key_agreement=False,
            encipher_only=False,
            decipher_only=False,
        )
        builder = _builder(subject, subject, key.public_key())
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        builder = builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        return cls(builder.add_extension(usage, critical=True).sign(key, hashes.SHA256()), key)

    def issue(self, user: str, group: str | None, hosts: Sequence[str] = ()) -> bytes:
        """Key and certificate, as PEM; for clients, and for servers under `hosts`."""
        key = ec.generate_private_key(ec.SECP256R1())
        builder = _builder(_name(user, group), self.certificate.subject, key.public_key())
        usages = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH])
        builder = builder.add_extension(usages, critical=False)
        authority = x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key())
        builder = builder.add_extension(authority, critical=False)
        if hosts:
            builder = builder.add_extension(
                x509.SubjectAlternativeName([_host(host) for host in hosts]), critical=False
            )
        certificate = builder.sign(self.key, hashes.SHA256())
        return _private(key) + certificate.public_bytes(serialization.Encoding.PEM)


def certify(layout: Layout, nodes: Sequence[str]) -> None:
    """Writes pki/ (NAME.pem: key and certificate) and kubeconfig/NAME for the administrator, components and nodes."""
    pki = layout.root / "pki"
    pki.mkdir(mode=0o700)
    authority = Authority.new(layout.name)
    (pki / "ca.pem").write_bytes(authority.certificate.public_bytes(serialization.Encoding.PEM))
    (pki / "ca.key").write_bytes(_private(authority.key))
    # RSA, as most clusters' service-account keys are.
    (pki / "tokens.pem").write_bytes(_private(rsa.generate_private_key(public_exponent=65537, key_size=2048)))
    (pki / "server.pem").write_bytes(authority.issue("kube-apiserver", None, API_NAMES))
    (pki / "front-proxy.pem").write_bytes(authority.issue("front-proxy", None))
    for name, user, group, hosts in (
        ("admin", "admin", "system:masters", ()),
        ("coredns", "coredns", None, ()),
        *((name, f"system:{name}", None, ()) for name in COMPONENTS),
        *((node, f"system:node:{node}", "system:nodes", (node_ip(node), node)) for node in nodes),
    ):
        (pki / f"{name}.pem").write_bytes(authority.issue(user, group, hosts))
        layout.render("kubeconfig.yaml", layout.root / "kubeconfig" / name, {"user": name})


def _builder(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key)
    builder = builder.serial_number(x509.random_serial_number())
    return builder.not_valid_before(now - datetime.timedelta(minutes=5)).not_valid_after(now + LIFETIME)


def _name(common: str, organization: str | None) -> x509.Name:
    parts = [x509.NameAttribute(NameOID.COMMON_NAME, common)]
    if organization:
        parts.append(x509.NameAttribute(NameOID.ORGANIZATION_NAME, organization))
    return x509.Name(parts)


def _host(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _private(key: ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey) -> bytes:
    plain = serialization.NoEncryption()
    return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.TraditionalOpenSSL, plain)
