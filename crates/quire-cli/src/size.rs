//! Sizes as they are typed: `512M`, `2G`, `1048576`, `50%`.

use std::fmt;
use std::str::FromStr;

use anyhow::{Result, bail};
use parse_size::Config;

/// What was asked for: bytes, or a part of the machine's memory.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Size {
    Bytes(u64),
    /// So many percent of a whole that depends on the option.
    Percent(f64),
}

impl FromStr for Size {
    type Err = anyhow::Error;

    /// Reads a size: units are 1024-based, a bare number is bytes, `%` is of a whole.
    fn from_str(text: &str) -> Result<Size> {
        let text = text.trim();
        if text.starts_with('-') {
            bail!("a size cannot be negative");
        }
        if let Some(number) = text.strip_suffix('%') {
            return match number.trim().parse::<f64>() {
                Ok(percent) if percent > 0.0 && percent <= 100.0 => Ok(Size::Percent(percent)),
                _ => bail!("a percentage is more than 0% and at most 100%"),
            };
        }
        match Config::new().with_binary().parse_size(text) {
            Ok(0) => bail!("a size cannot be 0"),
            Ok(bytes) => Ok(Size::Bytes(bytes)),
            Err(_) => bail!("not a size; write 512M, 2G, 1.5G, a number of bytes, or 50%"),
        }
    }
}

impl Size {
    /// The size in bytes, where 100% is `whole_bytes`.
    pub fn bytes_of(self, whole_bytes: u64) -> u64 {
        match self {
            Size::Bytes(bytes) => bytes,
            Size::Percent(percent) => (whole_bytes as f64 * percent / 100.0) as u64,
        }
    }
}

pub fn machine_memory_bytes() -> u64 {
    let info = rustix::system::sysinfo();
    info.totalram * u64::from(info.mem_unit)
}

/// A number of bytes as people read it: `256 MiB`, `1.3 GiB`.
#[derive(Clone, Copy, Debug)]
pub struct Human(pub u64);

impl fmt::Display for Human {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const UNITS: [&str; 5] = ["KiB", "MiB", "GiB", "TiB", "PiB"];
        if self.0 < 1024 {
            return write!(f, "{} B", self.0);
        }
        let mut value = self.0 as f64 / 1024.0;
        let mut unit = 0;
        while value >= 1023.95 && unit + 1 < UNITS.len() {
            value /= 1024.0;
            unit += 1;
        }
        // 256 MiB rather than 256.0 MiB
        if (value - value.round()).abs() < 0.05 {
            write!(f, "{value:.0} {}", UNITS[unit])
        } else {
            write!(f, "{value:.1} {}", UNITS[unit])
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units_are_of_1024() {
        for (text, bytes) in [
            ("1", 1),
            ("4096", 4096),
            ("512M", 512 << 20),
            ("512m", 512 << 20),
            ("512MB", 512 << 20),
            ("512MiB", 512 << 20),
            ("2G", 2 << 30),
            ("1.5G", 3 << 29),
            (" 64K ", 64 << 10),
            ("1T", 1 << 40),
        ] {
            assert_eq!(Size::from_str(text).unwrap(), Size::Bytes(bytes), "{text}");
        }
    }

    #[test]
    fn percentages_are_of_a_whole() {
        assert_eq!(Size::from_str("50%").unwrap().bytes_of(1 << 30), 1 << 29);
        assert_eq!(Size::from_str("12.5 %").unwrap().bytes_of(800), 100);
        assert_eq!(Size::from_str("100%").unwrap().bytes_of(u64::from(u32::MAX)), 0xffff_ffff);
        assert!(machine_memory_bytes() > 64 << 20);
    }

    #[test]
    fn nonsense_is_refused() {
        for text in ["", "M", "0", "0%", "101%", "-1", "-5%", "12Q", "1x", "nan%", "inf%", "1,5G"] {
            assert!(Size::from_str(text).is_err(), "{text}");
        }
    }

    #[test]
    fn people_read_sizes() {
        for (bytes, text) in [
            (0, "0 B"),
            (1023, "1023 B"),
            (1024, "1 KiB"),
            (256 << 20, "256 MiB"),
            ((1 << 30) - 1, "1 GiB"),
            (1395864371, "1.3 GiB"),
            (u64::MAX, "16384 PiB"),
        ] {
            assert_eq!(Human(bytes).to_string(), text);
        }
    }
}
