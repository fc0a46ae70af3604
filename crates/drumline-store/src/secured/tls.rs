//! The level `tls`: TLS 1.3, without an authority that signs certificates.
//!
//! The answerer shows a raw public key (RFC 7250) that its process has made at random. Nobody trusts that key
//! by itself. The proofs of the handshake go through the TLS connection and cover a value that TLS exports
//! from its keys ([`Tls::binding`]). Someone in the middle has two TLS connections with different keys, so no
//! proof fits.

use std::{
    fmt,
    io::{self, ErrorKind, Read, Write},
    sync::{Arc, OnceLock},
};

use ring::{rand::SystemRandom, signature::Ed25519KeyPair};
use rustls::{
    CertificateError, ClientConfig, ClientConnection, Connection, DigitallySignedStruct,
    ServerConfig, ServerConnection, SignatureScheme,
    client::{
        Resumption,
        danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier},
    },
    crypto::{CryptoProvider, ring as provider, verify_tls13_signature_with_raw_key},
    pki_types::{
        CertificateDer, PrivatePkcs8KeyDer, ServerName, SubjectPublicKeyInfoDer, UnixTime,
    },
    server::AlwaysResolvesServerRawPublicKeys,
    sign::CertifiedKey,
    version::TLS13,
};

/// One end of a TLS connection, without its socket.
pub(crate) struct Tls {
    connection: Connection,
    /// Received bytes. Those from `begin` to `end` have not been given to TLS yet.
    input: Vec<u8>,
    begin: usize,
    end: usize,
    /// The number of plain bytes that wait to be read.
    ready: usize,
    /// Whether the other end has said that nothing follows.
    ended: bool,
    failed: bool,
}

/// The length of the buffer for received bytes: at first enough for short messages, later for long ones.
const INPUT_BYTES_MIN: usize = 4 << 10;
const INPUT_BYTES_MAX: usize = 64 << 10;

/// The end that opened the connection.
pub(crate) fn caller() -> io::Result<Tls> {
    let name = ServerName::try_from("drumline").map_err(io::Error::other)?;
    let connection = ClientConnection::new(Ends::of_process()?.client.clone(), name);
    Ok(Tls::new(connection.map_err(io::Error::other)?.into()))
}

/// The end that accepted the connection.
pub(crate) fn answerer() -> io::Result<Tls> {
    let connection = ServerConnection::new(Ends::of_process()?.server.clone());
    Ok(Tls::new(connection.map_err(io::Error::other)?.into()))
}

impl Tls {
    fn new(mut connection: Connection) -> Tls {
        // A write is limited to BLOCK_BYTES, and the next one waits until all of it is out.
        connection.set_buffer_limit(None);
        let (input, begin, end) = (Vec::new(), 0, 0);
        Tls { connection, input, begin, end, ready: 0, ended: false, failed: false }
    }

    /// Whether the ends are still agreeing on keys.
    pub(crate) fn is_handshaking(&self) -> bool {
        self.connection.is_handshaking()
    }

    /// A value that only the two ends of this TLS connection know.
    pub(crate) fn binding(&self) -> io::Result<[u8; 32]> {
        let label = b"EXPORTER-drumline proofs";
        self.connection.export_keying_material([0; 32], label, None).map_err(io::Error::other)
    }

    /// Bytes that TLS has not been given yet count: after a read that took all that was opened, there may be some.
    pub(super) fn holds_input(&self) -> bool {
        self.ready > 0 || self.begin < self.end || self.ended || self.failed
    }

    pub(crate) fn holds_output(&self) -> bool {
        self.connection.wants_write()
    }

    /// Seals bytes, all of which are kept until [`Tls::push`] has moved them.
    pub(crate) fn seal(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.connection.writer().write_all(bytes)
    }

    pub(super) fn seal_end(&mut self) {
        self.connection.send_close_notify();
    }

    /// Moves sealed bytes into the stream.
    pub(crate) fn push(&mut self, stream: &mut impl Write) -> io::Result<()> {
        while self.connection.wants_write() {
            match self.connection.write_tls(stream) {
                Ok(0) => return Err(ErrorKind::WriteZero.into()),
                Ok(_) => {}
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Reads what the stream has. 0: the stream has ended.
    pub(crate) fn pull(&mut self, stream: &mut impl Read) -> io::Result<usize> {
        if self.begin == self.end {
            (self.begin, self.end) = (0, 0);
        }
        if self.end == self.input.len() {
            let room = (self.input.len() * 4).clamp(INPUT_BYTES_MIN, INPUT_BYTES_MAX);
            self.input.resize(room.max(self.end + INPUT_BYTES_MIN), 0);
        }
        let count = stream.read(&mut self.input[self.end..])?;
        self.end += count;
        self.feed();
        Ok(count)
    }

    /// Gives received bytes to TLS until it has opened some. TLS takes a few kilobytes at a time, and keeps
    /// what it has opened.
    fn feed(&mut self) {
        while self.ready == 0 && self.begin < self.end && !self.failed {
            let mut come = &self.input[self.begin..self.end];
            let before = come.len();
            let read = self.connection.read_tls(&mut come);
            self.begin += before - come.len();
            match (read, self.connection.process_new_packets()) {
                (Ok(1..), Ok(state)) => {
                    self.ready = state.plaintext_bytes_to_read();
                    self.ended |= state.peer_has_closed();
                }
                // Bytes behind the end are ignored.
                (Ok(0), Ok(_)) if self.ended => self.begin = self.end,
                // Bytes that came before the wrong bytes are not returned either.
                _ => self.failed = true,
            }
        }
    }

    /// Copies opened bytes into `bytes`. `None`: none are complete. 0: the other end has ended in good order.
    pub(crate) fn open(&mut self, bytes: &mut [u8]) -> io::Result<Option<usize>> {
        self.feed();
        if self.failed {
            let problem = "somebody changed bytes on the way (TLS does not accept them)";
            return Err(io::Error::new(ErrorKind::InvalidData, problem));
        }
        if self.ready == 0 {
            return Ok((self.ended || bytes.is_empty()).then_some(0));
        }
        let count = self.connection.reader().read(bytes)?;
        self.ready -= count;
        Ok(Some(count))
    }
}

impl fmt::Debug for Tls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tls").field("ready", &self.ready).field("ended", &self.ended).finish()
    }
}

/// The configuration that all TLS connections of this process share.
struct Ends {
    client: Arc<ClientConfig>,
    server: Arc<ServerConfig>,
}

impl Ends {
    /// Made at first use, with a key that no other process has.
    fn of_process() -> io::Result<&'static Ends> {
        static ENDS: OnceLock<Ends> = OnceLock::new();
        if let Some(ends) = ENDS.get() {
            return Ok(ends);
        }
        let made = Ends::make()?;
        Ok(ENDS.get_or_init(|| made))
    }

    fn make() -> io::Result<Ends> {
        let provider = Arc::new(provider::default_provider());
        let versions = [&TLS13];
        let pair = Ed25519KeyPair::generate_pkcs8(&SystemRandom::new());
        let pair = pair.map_err(|_| io::Error::other("the system gives no random key"))?;
        let key = provider::sign::any_eddsa_type(&PrivatePkcs8KeyDer::from(pair.as_ref()));
        let key = key.map_err(io::Error::other)?;
        let public =
            key.public_key().ok_or_else(|| io::Error::other("a key without public half"))?;
        let shown = CertificateDer::from(public.as_ref().to_vec());
        let shown = Arc::new(CertifiedKey::new(vec![shown], key));

        let mut server = ServerConfig::builder_with_provider(provider.clone())
            .with_protocol_versions(&versions)
            .map_err(io::Error::other)?
            .with_no_client_auth()
            .with_cert_resolver(Arc::new(AlwaysResolvesServerRawPublicKeys::new(shown)));
        // Connections are never resumed.
        server.send_tls13_tickets = 0;
        let mut client = ClientConfig::builder_with_provider(provider.clone())
            .with_protocol_versions(&versions)
            .map_err(io::Error::other)?
            .dangerous()
            .with_custom_certificate_verifier(Arc::new(AnyKey(provider)))
            .with_no_client_auth();
        client.resumption = Resumption::disabled();
        client.enable_sni = false;
        Ok(Ends { client: Arc::new(client), server: Arc::new(server) })
    }
}

/// Accepts any raw public key, because the proofs inside the connection are what counts. TLS still checks
/// that the other end has the private key.
#[derive(Debug)]
struct AnyKey(Arc<CryptoProvider>);

impl ServerCertVerifier for AnyKey {
    fn verify_server_cert(
        &self,
        _end_entity: &CertificateDer<'_>,
        _intermediates: &[CertificateDer<'_>],
        _server_name: &ServerName<'_>,
        _ocsp_response: &[u8],
        _now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        Ok(ServerCertVerified::assertion())
    }

    /// This process does not offer TLS 1.2.
    fn verify_tls12_signature(
        &self,
        _message: &[u8],
        _cert: &CertificateDer<'_>,
        _dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Err(CertificateError::BadSignature.into())
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        let key = SubjectPublicKeyInfoDer::from(cert.as_ref());
        let algorithms = &self.0.signature_verification_algorithms;
        verify_tls13_signature_with_raw_key(message, &key, dss, algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        vec![SignatureScheme::ED25519]
    }

    fn requires_raw_public_keys(&self) -> bool {
        true
    }
}
