import ai.onnxruntime.OnnxTensor;
import ai.onnxruntime.OrtEnvironment;
import ai.onnxruntime.OrtSession;
import java.io.IOException;
import java.io.InputStream;
import java.nio.charset.StandardCharsets;
import java.util.List;
import java.util.Map;

/** Holds an exported version of a model in its jar, as a resource, and tries it with ONNX Runtime. */
public final class Digits {
    private Digits() {}

    public static void main(String[] arguments) throws Exception {
        List<String[]> rows =
                new String(resource("digits.csv"), StandardCharsets.UTF_8).lines().map(line -> line.split(",")).toList();
        float[][] images = new float[rows.size()][64];
        for (int row = 0; row < images.length; row++) {
            for (int pixel = 0; pixel < 64; pixel++) {
                images[row][pixel] = Float.parseFloat(rows.get(row)[pixel + 1]);
            }
        }
        OrtEnvironment environment = OrtEnvironment.getEnvironment();
        try (OrtSession session = environment.createSession(resource("model.onnx"));
                OnnxTensor input = OnnxTensor.createTensor(environment, images);
                OrtSession.Result result = session.run(Map.of("images", input))) {
            long[] digits = (long[]) result.get(0).getValue();
            int right = 0;
            for (int row = 0; row < digits.length; row++) {
                if (digits[row] == Long.parseLong(rows.get(row)[0])) {
                    right++;
                }
            }
            System.out.println(right + " of " + digits.length + " digits are right");
        }
    }

    /** What `datastore model export digits:prod src/main/resources` has written. */
    private static byte[] resource(String name) throws IOException {
        try (InputStream stream = Digits.class.getResourceAsStream("/" + name)) {
            if (stream == null) {
                throw new IOException(name + " is not in the jar: export a version into src/main/resources first");
            }
            return stream.readAllBytes();
        }
    }
}
