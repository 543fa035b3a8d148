//! A client of Redis's protocol, as much of it as a load needs.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::Path;

use anyhow::{Context as _, Result, bail};

/// A connection.
pub(crate) struct Client {
    stream: BufReader<UnixStream>,
    /// Commands that have not been sent.
    pending: Vec<u8>,
}

/// What a server answers.
#[derive(PartialEq, Eq, Debug)]
pub(crate) enum Reply {
    /// `OK` and the like.
    Status(String),
    Value(Vec<u8>),
    /// There is no such key.
    Nothing,
}

impl Client {
    pub(crate) fn connect(socket: &Path) -> Result<Client> {
        let stream = UnixStream::connect(socket)?;
        Ok(Client { stream: BufReader::with_capacity(1 << 16, stream), pending: Vec::new() })
    }

    /// Adds a command to those that are sent together.
    pub(crate) fn queue(&mut self, words: &[&[u8]]) {
        encode(words, &mut self.pending);
    }

    /// Sends what is queued.
    pub(crate) fn send(&mut self) -> Result<()> {
        self.stream.get_mut().write_all(&self.pending)?;
        self.pending.clear();
        Ok(())
    }

    /// Sends a command and waits for the answer.
    pub(crate) fn call(&mut self, words: &[&[u8]]) -> Result<Reply> {
        self.queue(words);
        self.send()?;
        self.reply()
    }

    /// The answer to the oldest command that has none yet.
    pub(crate) fn reply(&mut self) -> Result<Reply> {
        let mut line = Vec::new();
        self.stream.read_until(b'\n', &mut line)?;
        let Some((kind, rest)) = line.split_first() else { bail!("the server is gone") };
        let rest = String::from_utf8_lossy(rest).trim_end().to_owned();
        match kind {
            b'+' | b':' => Ok(Reply::Status(rest)),
            b'$' if rest == "-1" => Ok(Reply::Nothing),
            b'$' => {
                let mut value = vec![0; rest.parse::<usize>().context("no length")? + 2];
                self.stream.read_exact(&mut value)?;
                value.truncate(value.len() - 2);
                Ok(Reply::Value(value))
            }
            b'-' => bail!("the server answers: {rest}"),
            _ => bail!("the server answers something unknown: {rest}"),
        }
    }
}

fn encode(words: &[&[u8]], to: &mut Vec<u8>) {
    to.extend_from_slice(format!("*{}\r\n", words.len()).as_bytes());
    for word in words {
        to.extend_from_slice(format!("${}\r\n", word.len()).as_bytes());
        to.extend_from_slice(word);
        to.extend_from_slice(b"\r\n");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A client whose server has answered this already.
    fn answered(text: &[u8]) -> Client {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        theirs.write_all(text).unwrap();
        Client { stream: BufReader::new(ours), pending: Vec::new() }
    }

    #[test]
    fn commands_are_arrays_of_strings() {
        let mut bytes = Vec::new();
        encode(&[b"GET", b"k1"], &mut bytes);
        assert_eq!(bytes, b"*2\r\n$3\r\nGET\r\n$2\r\nk1\r\n");
    }

    #[test]
    fn answers_are_read_one_by_one() {
        let mut client = answered(b"+OK\r\n$4\r\na\r\nb\r\n$-1\r\n-ERR no\r\n");
        assert_eq!(client.reply().unwrap(), Reply::Status("OK".into()));
        assert_eq!(client.reply().unwrap(), Reply::Value(b"a\r\nb".to_vec()));
        assert_eq!(client.reply().unwrap(), Reply::Nothing);
        assert_eq!(client.reply().unwrap_err().to_string(), "the server answers: ERR no");
        assert!(client.reply().is_err(), "the server is gone");
    }
}
